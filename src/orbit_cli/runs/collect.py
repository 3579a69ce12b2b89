"""`orbit rollout`: sample and score a dataset into a JSONL or Parquet file, with token ids, log-probs and versions.

Resumable: rows are appended prompt by prompt to the JSONL file, and prompts that are complete in it are not sampled
again. A Parquet file is made from it at the end, by one rename.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orbit_cli.config.schema.learning import Split
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.errors import ConfigError
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.runs.adapters import ServedAdapter, resolve_adapter
from orbit_cli.runs.assembly import check_device, serving
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.types import Prompt, Trajectory


def collect(config: OrbitConfig) -> dict[str, Any]:
    """Sample `rollout.collect_prompts` prompts x `rollout.group_size`. Returns what was written."""
    check_device(config)
    adapter = resolve_adapter(config)
    given = Path(config.run.output) if config.run.output else None
    if given is not None:
        _check_output(given)
    folder = RunFolder.create(config)
    target = given or folder.path / "rollouts.jsonl"
    rows = target if target.suffix == ".jsonl" else target.with_suffix(".jsonl")
    recorder = Recorder(folder, config)
    recorder.planned(planned_peaks(config, trains=False))
    with folder.running(), recorder, serving(config, folder.engine_log, recorder.notify, adapter=adapter) as served:
        recorder.engine(served.engine.gpu_memory)
        version = adapter.publish(served.engine) if adapter else None
        if config.rollout.collect_split is Split.eval:
            prompts = served.environment.eval_prompts(config.rollout.collect_prompts)
        else:
            prompts = [served.environment.train_prompt(i) for i in range(config.rollout.collect_prompts)]
        done = _complete(rows, config.rollout.group_size)
        todo = [p for p in prompts if p.id not in done]
        if done:
            recorder.notify(f"{len(prompts) - len(todo)} of {len(prompts)} prompts are in {rows} already")
        written = _sample(config, served, recorder, todo, version, adapter, rows)
    if target.suffix == ".parquet":
        _to_parquet(rows, target)
    return {"output": str(target), "prompts": len(prompts), "rows": written, "skipped": len(prompts) - len(todo)}


def _check_output(target: Path) -> None:
    """Refuse a file that cannot be written, before anything is made. Raises ConfigError."""
    if target.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"run.output={target} has an unknown ending; use .jsonl or .parquet")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.output={target}: its folder cannot be made ({error.strerror}); set another") from error


def _sample(
    config: OrbitConfig,
    served,
    recorder: Recorder,
    prompts: list[Prompt],
    version: int | None,
    adapter: ServedAdapter | None,
    rows: Path,
) -> int:
    rollout, written, started = config.rollout, 0, time.perf_counter()
    params = served.generator.sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
    tokens = 0
    with rows.open("a") as file:
        for start in range(0, len(prompts), rollout.prompts_per_step):
            part = prompts[start : start + rollout.prompts_per_step]
            trajectories = served.generator.sample(
                part,
                samples=rollout.group_size,
                params=params,
                version=version,
                seed=config.seed,
                place=("rollout",),
                on_turn=recorder.turn,
            )
            by_id = {p.id: p for p in part}
            for trajectory in trajectories:
                file.write(json.dumps(_row(trajectory, by_id[trajectory.prompt_id], adapter)) + "\n")
            file.flush()
            os.fsync(file.fileno())
            written += len(trajectories)
            tokens += sum(t.response_tokens for t in trajectories)
            recorder.progress("rollout", start + len(part), len(prompts), tokens, time.perf_counter() - started)
    return written


def _row(trajectory: Trajectory, prompt: Prompt, adapter: ServedAdapter | None) -> dict[str, Any]:
    row = asdict(trajectory)
    row["finish_reason"] = str(trajectory.finish_reason)
    row["messages"] = prompt.messages
    row["reference_answer"] = prompt.answer
    row["environment"] = prompt.environment
    row["adapter"] = adapter.name if adapter else None
    return row


def _complete(rows: Path, samples: int) -> set[str]:
    """Ids of prompts with all their samples in the file; a cut last line is dropped from it."""
    if not rows.exists():
        return set()
    seen: dict[str, int] = {}
    whole: list[str] = []
    for line in rows.read_text().splitlines():
        try:
            identity = json.loads(line)["prompt_id"]
        except (ValueError, KeyError):
            continue  # the line a killed run was writing
        seen[identity] = seen.get(identity, 0) + 1
        whole.append(line)
    complete = {identity for identity, count in seen.items() if count >= samples}
    kept = [line for line in whole if json.loads(line)["prompt_id"] in complete]
    partial = rows.with_name(f".{rows.name}.partial")
    partial.write_text("".join(line + "\n" for line in kept))
    os.replace(partial, rows)
    return complete


def _to_parquet(rows: Path, target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([json.loads(line) for line in rows.read_text().splitlines()])
    partial = target.with_name(f".{target.name}.partial")
    pq.write_table(table, partial)
    os.replace(partial, target)
