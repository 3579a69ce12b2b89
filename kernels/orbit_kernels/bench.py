"""`python -m orbit_kernels.bench`: the expert kernels against BF16 weights in memory and against decoding first.

    python -m orbit_kernels.bench [--out rows.json] [--shapes kimi-k2.6 ...] [--tokens 1024 4096 ...] [--formats int4]

Prints a table and writes rows {shape, format, tokens, path, pass, ms, ratio_bf16, transient_bytes}. A ratio is to
`torch._grouped_mm` on resident BF16 weights, timed in the same run. Random weights, activations and routing; medians.
Passes: forward and gradient are the two products (w13, w2) alone; layer is the whole MLP, forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

from orbit_kernels.bench_paths import Problem, bf16_resident, chunked_eager, expert_loop, layer, ours

SHAPES = {
    # name: (experts, hidden, intermediate, experts per token)
    "kimi-k2.6": (384, 7168, 2048, 8),
    "v4-flash": (256, 4096, 2048, 6),
    "v4-pro": (384, 7168, 3072, 6),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "kimi-k2.6-ep8": (48, 7168, 2048, 8),
    "kimi-k2.6-tp8": (384, 7168, 256, 8),
}
TRAINING = ("kimi-k2.6", "v4-flash", "v4-pro")
DECODING = ("kimi-k2.6-ep8", "kimi-k2.6-tp8", "qwen3-30b-a3b", "v4-flash")
TOKENS = (1024, 4096, 16384, 65536)
DECODING_TOKENS = (1, 16, 64, 256, 4096)
ADAPTERS = ("none", "oft32", "lora16")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; an example: kimi-k2.6, int4, 4096, kernels, forward, 7.6 ms, 0.75, 0 bytes."""

    shape: str
    format: str
    tokens: int
    path: str
    pass_: str
    ms: float
    ratio_bf16: float
    transient_bytes: int

    def as_json(self) -> dict:
        return {name.rstrip("_"): getattr(self, name) for name in self.__slots__}


def time_ms(calls: list[Callable[[], object]], rounds: int, graph: bool = False) -> list[float]:
    """Median milliseconds of each call. Taken in turn, so that a GPU that slows down under load slows all of them.

    `graph` times replays of a CUDA graph, for calls that are shorter than their launches.
    """
    for call in calls:
        call()
    one = functools.partial(do_bench_cudagraph, rep=20) if graph else functools.partial(do_bench, warmup=5, rep=25)
    found = [[one(call, return_mode="median") for call in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def transient(call: Callable[[], object], named: int) -> int:
    """Peak bytes that a call allocates beyond `named`, those of its results."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - named)


def measure(
    name: str, fmt: str, problem: Problem, tokens: int, slow: bool, whole: bool, graph: bool = False
) -> list[Row]:
    """All paths of one size. `slow` adds the paths that decode first, `whole` the MLP with adapters."""
    experts, hidden, inter, slots = SHAPES[name]
    batch = problem.batch(tokens)
    rows: list[Row] = []
    products = {}  # ms of both passes, by path

    def add(path: str, pass_: str, ms: float, base: float, spare: int) -> None:
        row = Row(name, fmt, tokens, path, pass_, ms, ms / base, spare)
        rows.append(row)
        rate = (12 if pass_ == "layer" else 6) * tokens * slots * hidden * inter / ms / 1e9
        print(f"{name:14} {fmt:5} {tokens:6} {path:18} {pass_:9} {ms:9.3f} ms {ms / base:6.3f} {rate:5.0f} TFLOP/s "
              f"{spare / 2**20:8.1f} MiB", flush=True)  # fmt: skip

    for pass_ in ("forward", "gradient"):
        paths = {"bf16 resident": bf16_resident, "kernels": ours}
        if slow:
            paths |= {"eager chunks": chunked_eager, "loop over experts": expert_loop}
        calls = [functools.partial(call, problem, batch, pass_) for call in paths.values()]
        fast = time_ms(calls[:2], 2, graph)
        times = fast + (time_ms(calls[2:], 1) if slow else [])
        for path, call, ms in zip(paths, calls, times, strict=True):
            add(path, pass_, ms, times[0], transient(call, batch.result_bytes(pass_)))
            products[path] = products.get(path, 0.0) + ms
    if whole:
        for adapter in ADAPTERS:
            call = layer(problem, batch, adapter)
            (ms,) = time_ms([call], 2)
            add(f"layer {adapter}", "layer", ms, products["bf16 resident"], transient(call, 0))
            print(f"{'':14} {adapter}: {ms / products['kernels']:.3f} of the kernels' two products", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("moe.json"))
    parser.add_argument("--shapes", nargs="*", choices=SHAPES)
    parser.add_argument("--formats", nargs="*", default=["int4", "mxfp4"])
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--decoding", action="store_true", help="the shapes and sizes of decoding instead")
    parser.add_argument("--slow", action="store_true", help="also the paths that decode first")
    parser.add_argument("--whole", action="store_true", help="also the whole MLP with adapters")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    options = parser.parse_args()
    shapes = options.shapes or (DECODING if options.decoding else TRAINING)
    tokens = options.tokens or (DECODING_TOKENS if options.decoding else TOKENS)
    torch.manual_seed(0)
    rows = []
    for name in shapes:
        for fmt in options.formats:
            problem = Problem.random(*SHAPES[name], fmt)
            for count in tokens:
                slow = options.slow and fmt == "int4" and count == 4096
                rows += [
                    row.as_json() for row in measure(name, fmt, problem, count, slow, options.whole, options.decoding)
                ]
                torch.cuda.empty_cache()
            del problem
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    if options.append and options.out.exists():
        rows = json.loads(options.out.read_text())["rows"] + rows
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)  # a line each, for readable differences
    options.out.write_text(f'{{\n "about": {json.dumps(about)},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
