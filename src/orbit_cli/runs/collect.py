"""`orbit rollout`: sample and score a dataset into a JSONL or Parquet file, with token ids, log-probs and versions.

Resumable: rows are appended prompt by prompt to the JSONL file, and prompts that are complete in it are not sampled
again; a file that holds rows of another making is refused (rollout_file.py). A Parquet file is made from it at the end,
by one rename.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orbit_cli.config.schema.learning import Split
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.environments.protocol import Environment
from orbit_cli.environments.registry import build_environment
from orbit_cli.errors import ConfigError, writing
from orbit_cli.models.check import check_known
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.runs.adapters import ServedAdapter, resolve_adapter
from orbit_cli.runs.assembly import Serving, check_device, compute_dtype, serving
from orbit_cli.runs.rollout_file import RolloutFile, making
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.types import Prompt, Trajectory


def collect(config: OrbitConfig) -> dict[str, Any]:
    """Sample `rollout.collect_prompts` prompts x `rollout.group_size`. Returns {output, rows, prompts: what the file
    has, new_rows, new_prompts: what of it was sampled now}.

    Without anything left to sample no engine is started and no run folder made. Raises ConfigError, before either, for
    an output that holds something else.
    """
    check_device(config)
    adapter = resolve_adapter(config)
    given = Path(config.run.output).expanduser() if config.run.output else None
    environment = build_environment(config.environment, config.seed, config.evaluation.prompts)
    with closing(environment):
        prompts = _prompts(config, environment)
        done: set[str] = set()
        if given is not None:
            _check_output(given)
            if _rows_of(given).exists():
                base = prepare_base(config.model, config.quantization, check=check_known)
                done = _file(config, given, base, adapter).complete(prompts)
        todo = [prompt for prompt in prompts if prompt.id not in done]
        if not todo:
            assert given is not None, "only a file that was there can have everything"
            return _finish(given, new_rows=0, new_prompts=0)
        folder = RunFolder.create(config)
        target = given or folder.path / "rollouts.jsonl"
        recorder = Recorder(folder, config)
        recorder.planned(planned_peaks(config, trains=False))
        notify = recorder.notify
        with (
            folder.running(),
            recorder,
            serving(config, folder.engine_log, notify, adapter=adapter, environment=environment) as served,
        ):
            recorder.engine(served.engine.gpu_memory)
            if adapter is not None:
                notify(f"{adapter.name}: {adapter.origin}")
            if done:
                notify(f"{len(prompts) - len(todo)} of {len(prompts)} prompts are in {_rows_of(target)} already")
            file = _file(config, target, served.base, adapter)
            written = _sample(config, served, recorder, todo, adapter, file)
    return _finish(target, new_rows=written, new_prompts=len(todo))


def _prompts(config: OrbitConfig, environment: Environment) -> list[Prompt]:
    count = config.rollout.collect_prompts
    if config.rollout.collect_split is Split.eval:
        return environment.eval_prompts(count)
    return [environment.train_prompt(index) for index in range(count)]


def _rows_of(target: Path) -> Path:
    """The JSONL file that a target grows in."""
    return target if target.suffix == ".jsonl" else target.with_suffix(".jsonl")


def _file(config: OrbitConfig, target: Path, base: Path, adapter: ServedAdapter | None) -> RolloutFile:
    dtype = str(compute_dtype(config)).removeprefix("torch.")
    return RolloutFile(_rows_of(target), making(config, base, adapter, dtype))


def _check_output(target: Path) -> None:
    """Refuse a file that cannot be written, before anything is made. Raises ConfigError."""
    if target.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"run.output={target} has an unknown ending; use .jsonl or .parquet")
    if target.exists() and not _rows_of(target).exists():
        raise ConfigError(
            f"run.output={target} is there already, and {_rows_of(target).name}, in which it would be gone on with, is "
            "not; set run.output to another file"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.output={target}: its folder cannot be made ({error.strerror}); set another") from error


def _sample(
    config: OrbitConfig,
    served: Serving,
    recorder: Recorder,
    prompts: list[Prompt],
    adapter: ServedAdapter | None,
    file: RolloutFile,
) -> int:
    """Sample the prompts part by part into the file; how many rows that were."""
    rollout, written, started = config.rollout, 0, time.perf_counter()
    params = served.generator.sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
    version = adapter.publish(served.engine) if adapter else None
    tokens = 0
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
        file.append([_row(trajectory, by_id[trajectory.prompt_id], adapter) for trajectory in trajectories])
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


def _finish(target: Path, *, new_rows: int, new_prompts: int) -> dict[str, Any]:
    """Make the Parquet file from the rows, if that is what was asked for; what `collect` returns."""
    if target.suffix == ".parquet":
        _write_parquet(target)
    with _rows_of(target).open(encoding="utf-8") as lines:
        prompt_ids = [json.loads(line)["prompt_id"] for line in lines]  # one row in memory at a time
    return {
        "output": str(target),
        "rows": len(prompt_ids),
        "prompts": len(set(prompt_ids)),
        "new_rows": new_rows,
        "new_prompts": new_prompts,
    }


def _write_parquet(target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = _rows_of(target).read_text(encoding="utf-8").splitlines()
    partial = target.with_name(f".{target.name}.partial")
    with writing(target):
        try:
            pq.write_table(pa.Table.from_pylist([json.loads(line) for line in rows]), partial)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
