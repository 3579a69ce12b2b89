#!/usr/bin/env python3
"""Small expert layers through every kernel once, for compute-sanitizer, which is too slow for the tests.

    python scripts/small_expert_layers.py                                          # on a GPU; compiles, and checks
    compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/small_expert_layers.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/small_expert_layers.py --formats int4 mxfp4

For each format: a layer without adapter, with OFT and with LoRA, forward and backward, over a routing that leaves
experts empty and gives one a single token, and the serving forward at 1 and 21 tokens. Every result must be finite.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from orbit_kernels.bench_paths import Problem, layer, served  # noqa: E402

EXPERTS, HIDDEN, INTER, SLOTS = 6, 512, 512, 2
TRAINED, SERVED = (150, 9), (1, 21)  # tokens; with 9 the kernels for few rows train, too


def run(fmt: str) -> list[str]:
    """The names of what came out infinite or NaN."""
    problem = Problem.random(EXPERTS, HIDDEN, INTER, SLOTS, fmt)
    wrong = []
    for tokens in TRAINED:
        batch = problem.batch(tokens)
        batch.ids[:] = batch.ids % 2  # experts 0 and 1, both or one of them twice,
        batch.ids[7, 0] = 4  # and one token alone; 2, 3 and 5 stay empty
        for adapter in ("none", "oft32", "lora16"):
            found = layer(problem, batch, adapter)()
            wrong += [f"{fmt} {adapter}, {tokens}: {i}" for i, t in enumerate(found) if not t.isfinite().all()]
    for tokens in SERVED:
        if not served(problem, problem.batch(tokens)).isfinite().all():
            wrong.append(f"{fmt} served {tokens}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4", "mxfp4", "nvfp4", "fp8"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these are the kernels of a GPU; there is none here")
    torch.manual_seed(0)
    wrong = [name for fmt in options.formats for name in run(fmt)]
    torch.cuda.synchronize()
    print("; ".join(wrong) or f"{', '.join(options.formats)}: all finite")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
