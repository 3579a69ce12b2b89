#!/usr/bin/env python3
"""Time a few steps of the main job, and of the same job with TRL's GRPOTrainer, one after the other on this machine.

    python scripts/bench_main_job.py --steps 6 --out docs/benchmarks/main_job_cpu.json [--trl-site DIR] [OVERRIDES...]

Both sides: SmolLM2-135M-Instruct, the same prompts in the same order, the same group size, batch, response length and
temperature, one optimiser step a batch, float32 activations, all cores. TRL trains LoRA on the plain weights, because
it cannot hold the INT4 base; Orbit trains what its config says. Figures are seconds per step after the first (which
pays for warming up). `--trl-site` is a folder made by

    pip install --target DIR --no-deps trl accelerate datasets multiprocess xxhash dill pandas

for an environment without TRL.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path


def orbit_side(steps: int, overrides: list[str]) -> dict[str, float]:
    """Run `orbit train` for `steps` steps without evaluation; mean seconds of each phase, first step left out."""
    from orbit_cli.config.compose import compose
    from orbit_cli.runs.train import train
    from orbit_cli.telemetry.metrics import read_rows

    config = compose([*overrides, f"trainer.steps={steps}", "evaluation.prompts=0", "run.root=/tmp/orbit-bench"])
    result = train(config)
    rows = [r for r in read_rows(Path(result["run"]) / "metrics.jsonl") if r["kind"] == "train"][1:]
    phases = ("step_seconds", "rollout_seconds", "train_seconds", "sync_seconds", "rollout_tokens")
    return {name: sum(r[name] for r in rows) / len(rows) for name in phases}


def trl_side(steps: int, overrides: list[str]) -> dict[str, float]:
    """The same job with TRL's GRPOTrainer (LoRA)."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from orbit_cli.config.compose import compose
    from orbit_cli.environments.registry import build_environment
    from orbit_cli.quantization.base_model import prepare_base

    config = compose([*overrides, "quantization=bf16"])
    base = prepare_base(config.model, config.quantization)
    environment = build_environment(config.environment, config.seed)
    rollout = config.rollout
    count = steps * rollout.prompts_per_step
    prompts = [environment.train_prompt(i) for i in range(count)]
    by_text = {json.dumps(p.messages): p for p in prompts}

    def reward(prompts, completions, **_):
        graded = [
            environment.step(by_text[json.dumps(p)], [c[0]["content"]]).grade.reward
            for p, c in zip(prompts, completions, strict=True)
        ]
        return [r if r is not None else 0.0 for r in graded]

    class Clock(TrainerCallback):
        def __init__(self):
            self.marks = [time.perf_counter()]

        def on_step_end(self, *args, **kwargs):
            self.marks.append(time.perf_counter())

    clock = Clock()
    batch = rollout.prompts_per_step * rollout.group_size
    arguments = GRPOConfig(
        output_dir="/tmp/orbit-bench/trl",
        max_steps=steps,
        per_device_train_batch_size=batch,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        learning_rate=1e-4,
        beta=0.0,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    targets = list(config.adapter.targets)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(base),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": p.messages} for p in prompts]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    clock.marks = [time.perf_counter()]
    trainer.train()
    times = [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)][1:]
    return {"step_seconds": sum(times) / len(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trl-site", type=Path)
    parser.add_argument("--side", choices=("orbit", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.side:
        side = {"orbit": orbit_side, "trl": trl_side}[given.side]
        if given.side == "trl" and given.trl_site:
            sys.path.append(str(given.trl_site))
        print("RESULT " + json.dumps(side(given.steps, given.overrides)))
        return
    results = {}
    for side in ("orbit", "trl"):
        command = [sys.executable, __file__, "--side", side, "--steps", str(given.steps), *given.overrides]
        command += ["--trl-site", str(given.trl_site)] if given.trl_site else []
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"the {side} side failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        results[side] = json.loads(lines[-1].removeprefix("RESULT "))
    results["ratio_trl_over_orbit"] = results["trl"]["step_seconds"] / results["orbit"]["step_seconds"]
    results["machine"] = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
    results["date"] = time.strftime("%Y-%m-%d")
    print(json.dumps(results, indent=1))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
