"""`orbit eval`: the base and an adapter side by side on the same held-out prompts and the same random numbers."""

from __future__ import annotations

from typing import Any

from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.errors import ConfigError
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.rollout.evaluate import eval_metrics, evaluate_version
from orbit_cli.runs.adapters import resolve_adapter
from orbit_cli.runs.assembly import check_device, serving
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.types import EvalResult


def evaluate(config: OrbitConfig) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {policy: {dataset: figures}}: policies "base" and the adapter's name, "all" among the datasets."""
    check_device(config)
    adapter = resolve_adapter(config)
    if adapter is None and not config.evaluation.base:
        raise ConfigError(
            "evaluation.base=false and run.adapter is not set: there is nothing to evaluate; set run.adapter"
        )
    folder = RunFolder.create(config)
    recorder = Recorder(folder, config)
    recorder.planned(planned_peaks(config, trains=False, evaluates=True))
    table: dict[str, dict[str, dict[str, float]]] = {}
    with folder.running(), recorder, serving(config, folder.engine_log, recorder.notify, adapter=adapter) as served:
        recorder.engine(served.engine.gpu_memory)
        if adapter is not None:
            recorder.notify(f"{adapter.name}: {adapter.origin}")
        policies: list[tuple[str, int | None]] = [("base", None)] if config.evaluation.base else []
        if adapter is not None:
            policies.append((adapter.name, adapter.publish(served.engine)))
        for name, version in policies:
            recorder.notify(f"evaluating {name}")
            with recorder.phase("eval"):
                result = evaluate_version(
                    served.engine,
                    served.environment,
                    served.generator,
                    config,
                    version=version,
                    on_turn=recorder.turn,
                )
            recorder.evaluation(0 if version is None else version, result, policy=name)
            table[name] = _by_dataset(result, config)
        recorder.notify(f"kept in {folder.path}")
    return table


def _by_dataset(result: EvalResult, config: OrbitConfig) -> dict[str, dict[str, Any]]:
    """Figures over all prompts, and by dataset where prompts name more than one."""
    datasets = sorted({t.dataset for t in result.trajectories})
    rows = {"all": result.metrics}
    if len(datasets) > 1:
        for dataset in datasets:
            rows[dataset] = eval_metrics([t for t in result.trajectories if t.dataset == dataset], config)
    return rows
