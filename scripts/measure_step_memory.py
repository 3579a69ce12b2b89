#!/usr/bin/env python3
"""Planned against measured memory of the trainer alone: the largest step that a config allows, on random tokens.

    python scripts/measure_step_memory.py model=tiny_moe [any override of orbit train] [--out memory.json]

Prompts and responses have the lengths with which the most tokens share a micro-batch, as a plan counts, and every group
differs in its rewards. No engine is started. Prints what `orbit train` writes into memory.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.compose import compose
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.planner.lengths import lengths
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.runs.assembly import check_device, set_threads, trainer_model
from orbit_cli.telemetry.memory import MemoryRecorder
from orbit_cli.trainer.optimizer import make_optimizer
from orbit_cli.trainer.step import optimise, prepare
from orbit_cli.types import FinishReason, Trajectory

STEPS = 2  # the optimizer's moments exist from the first step's end


def random_batch(config: OrbitConfig, vocabulary: int) -> list[Trajectory]:
    """One step's samples, of the lengths that fill a micro-batch most."""
    rollout, planned = config.rollout, lengths(config)
    prompt, response = planned.micro_prompt, planned.micro_response
    batch = []
    for group in range(rollout.prompts_per_step):
        question = torch.randint(vocabulary, (prompt,)).tolist()
        for sample in range(rollout.group_size):
            batch.append(
                Trajectory(
                    prompt_id=f"random/{group}",
                    group=group,
                    sample=sample,
                    token_ids=question + torch.randint(vocabulary, (response,)).tolist(),
                    policy_mask=[False] * prompt + [True] * response,
                    logprobs=[0.0] * prompt + [-10.0] * response,
                    versions=[0] * (prompt + response),
                    reward=float(sample % 2),
                    reward_parts={},
                    finish_reason=FinishReason.length,
                    text="",
                    correct=False,
                )
            )
    return batch


def measure(config: OrbitConfig, out: Path) -> dict:
    """Run STEPS steps and return the memory record."""
    torch.manual_seed(config.seed)
    check_device(config)
    set_threads(config)
    base = prepare_base(config.model, config.quantization)
    model = trainer_model(config, base, spec_from_config(config.adapter))
    optimizer = make_optimizer(list(model.bank.parameters()), config.trainer)
    out.unlink(missing_ok=True)  # a recorder goes on with what it finds
    recorder = MemoryRecorder(out)
    recorder.planned(planned_peaks(config))
    for step in range(STEPS):
        batch = random_batch(config, model.module.config.vocab_size)
        with recorder.phase("train"):
            optimise(model, optimizer, prepare(batch, config), config, step)
            model.bank.materialize()
        recorder.held(model.memory())
    with recorder.phase("rollout"):  # what stays while the engine would sample
        pass
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, help="keep the record in this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = measure(compose(options.overrides), options.out or Path(folder) / "memory.json")
    rows = [("train", name, row) for name, row in record["planned"]["train"].items() if not name.endswith("used_gib")]
    rows += [("held", name, row) for name, row in record["parts"].items()]
    print(f"{'':28} planned  measured GiB")
    for phase, name, row in rows:
        if row["measured_gib"] is not None:
            off = "" if row["off_percent"] is None else f"{row['off_percent']:+6.1f}%"
            print(f"{phase:6} {name:20} {row['planned_gib']:8.3f} {row['measured_gib']:8.3f}  {off}")


if __name__ == "__main__":
    main()
