"""The first thing that train, rollout and eval do: refuse what cannot work, in one sentence, before anything is loaded.

What Orbit cannot run yet comes first, then what does not fit, then what the machine lacks: nobody is sent to download
a model or to find GPUs for a run that would be refused there. On a GPU a plan that does not fit is refused. On a CPU
only what is certain is: base and adapter that exceed the machine's memory; everything else there is an upper bound,
and memory that is never touched costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import ModelSource
from orbit_cli.config.schema.system import Device
from orbit_cli.errors import ConfigError
from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.built import listed, not_built
from orbit_cli.planner.checkpoint import check_files, facts_of, wanted
from orbit_cli.planner.families import FAMILIES
from orbit_cli.planner.gpus import Gpu, usable_gpus
from orbit_cli.planner.machine import TORCH_MAPS, address_space
from orbit_cli.planner.model import read_model
from orbit_cli.planner.part import size
from orbit_cli.planner.plan import MIB, WORK, Plan, make_plan
from orbit_cli.planner.today import plan_command, runs_today, still_missing

VERBS = {"train": "train", "rollout": "sample from", "eval": "evaluate"}


def preflight(config: OrbitConfig, *, command: str, overrides: Sequence[str] | None = None) -> Plan | None:
    """Plan and refuse. None where the model cannot be planned: then the run itself says what is wrong with it.

    `command` is train, rollout or eval; `overrides` are those it was given, for the `orbit plan` to paste (None: they
    do not say all, as when a run is resumed). Raises ConfigError or CheckpointError (exit code 2).
    """
    model = config.model
    lacks_files = model.source is ModelSource.checkpoint and not model.path
    if model.source is ModelSource.checkpoint and model.path:
        facts_of(model)  # the folder is that model, or this says which field differs
    check_files(model)
    if lacks_files and model.repository is None:
        raise ConfigError(f"model.source=checkpoint needs model.path; set it to {wanted(model)}")
    checked = config.memory.preflight
    if checked:
        require_address_space()
    plan = _plan(config, command) if checked or lacks_files else None
    if plan is not None and checked:
        _refuse_not_built(plan, command, overrides)
        _refuse_too_large(plan, command, overrides)
    found = usable_gpus() if config.hardware.device is Device.cuda and (checked or lacks_files) else None
    if lacks_files:
        raise ConfigError(_files(config, plan, _missing_gpus(config, _count(found))))
    if not checked:
        return None
    require_gpus(config, _count(found))
    if plan is not None:
        _require_memory(plan, found or [], command, overrides)
    return plan


def require_address_space() -> None:
    """Refuse a process that may map less than PyTorch's libraries take. Raises ConfigError."""
    limit = address_space()
    if limit is not None and limit < TORCH_MAPS:
        raise ConfigError(
            f"this process may map {size(limit)} of address space (ulimit -v), and PyTorch's libraries alone take more "
            f"than {size(TORCH_MAPS)}; lift the limit with `ulimit -v unlimited`"
        )


def require_gpus(config: OrbitConfig, found: int | None) -> None:
    """Refuse hardware with more GPUs than were `found` (None: that cannot be told). Raises ConfigError."""
    missing = _missing_gpus(config, found)
    if missing:
        raise ConfigError(
            f"hardware={config.hardware.name} needs {missing}; set hardware=cpu or run where the GPUs are"
        )


def _missing_gpus(config: OrbitConfig, found: int | None) -> str:
    """What GPUs are missing, as the end of "... needs"; empty if none are."""
    needed = max(1, config.hardware.gpus)
    if config.hardware.device is not Device.cuda or found is None or found >= needed:
        return ""
    return f"{needed} GPU{'s' * (needed > 1)} and this machine shows {found or 'none'}"


def _refuse_not_built(plan: Plan, command: str, overrides: Sequence[str] | None) -> None:
    """Raises ConfigError naming everything that would have to be built, and what can be run instead."""
    trains = command == "train"
    if not not_built(plan, trains=trains):
        return
    config, instead = plan.config, runs_today(plan, trains=trains)
    if instead is not None:
        then = f"set {' '.join(instead.overrides)} to run it today"
    else:
        then = f"{_shown(command, overrides)} shows what it will take"
    raise ConfigError(
        f"Orbit cannot {VERBS[command]} {config.model.name} on {config.hardware.name} yet: it needs "
        f"{listed(still_missing(plan, trains=trains))}{_nor_fits(plan)}; {then}"
    )


def _nor_fits(plan: Plan) -> str:
    """That it would not fit either, to be added to what is not built; empty if it would."""
    reason = _too_large(plan)
    return f"; and it would not fit either: {reason}" if reason else ""


def _refuse_too_large(plan: Plan, command: str, overrides: Sequence[str] | None) -> None:
    """Raises ConfigError with the numbers and the nearest config that works."""
    reason = _too_large(plan)
    if reason:
        name = f"{plan.config.model.name} does not fit hardware={plan.config.hardware.name}"
        raise ConfigError(f"{name}: {reason}; {_remedy(plan, command, overrides)}")


def _too_large(plan: Plan) -> str:
    """Why the plan cannot work; empty if it can."""
    if plan.layout.on_gpu:
        return "" if plan.fits else plan.limits[0].partition("; ")[0]  # what takes most, `orbit plan` says
    if plan.memory is None or plan.certain_bytes <= plan.memory:
        return ""
    return f"base and adapter alone need {size(plan.certain_bytes)} and this machine has {size(plan.memory)} of memory"


def _remedy(plan: Plan, command: str, overrides: Sequence[str] | None) -> str:
    """What to set, preferring what can be run today, and the command that shows it."""
    trains = command == "train"
    today = runs_today(plan, trains=trains)
    nearest = today or nearest_fit(plan, trains=trains)
    if nearest is None:
        return f"nothing in reach makes it fit; choose a smaller model ({_shown(command, overrides)} shows every part)"
    advice = f"set {' '.join(nearest.overrides)} ({_shown(command, overrides, nearest.overrides)} shows every part)"
    if today is None:
        missing = listed(not_built(nearest.plan, trains=trains))
        return f"it would fit with other settings, which need {missing}, not built yet: {advice}"
    return advice


def _shown(command: str, overrides: Sequence[str] | None, more: Sequence[str] = ()) -> str:
    if overrides is not None:
        return f"`{plan_command(command, overrides, more)}`"
    return f"`orbit plan` with the run's settings{' and ' * bool(more)}{' '.join(more)}"


def _files(config: OrbitConfig, plan: Plan | None, gpus: str) -> str:
    """Model files that are not there, with the GPUs that are not either."""
    model, where = config.model, ", on the machine with the GPUs" if gpus else ""
    files = f"its {size(plan.model.checkpoint_bytes)} of files" if plan is not None else "its files"
    also = f"; hardware={config.hardware.name} needs {gpus}" if gpus else ""
    return (
        f"{model.name} needs {files}, which are not part of Orbit, and model.path is not set{also}: download "
        f"{model.repository} and set model.path=FOLDER{where}"
    )


def _require_memory(plan: Plan, found: list[Gpu], command: str, overrides: Sequence[str] | None) -> None:
    """Refuse GPUs that are smaller than the plan's, or fuller than it can bear. Raises ConfigError."""
    hardware, need = plan.config.hardware, plan.peak.nbytes
    what = f"{WORK[plan.peak.name]} needs {size(need)}"
    for number, gpu in enumerate(found[: max(1, hardware.gpus)]):
        if gpu.total_mib is not None and gpu.total_mib * MIB * (1 - plan.config.memory.headroom) < need:
            raise ConfigError(
                f"hardware={hardware.name} counts on GPUs of {size(plan.memory or need)}, but GPU {number} here has "
                f"{size(gpu.total_mib * MIB)} and {what}; see what fits with "
                + _shown(command, overrides, [f"hardware.memory_mib={gpu.total_mib}"])
            )
        if gpu.free_mib is not None and gpu.free_mib * MIB < need:
            raise ConfigError(
                f"GPU {number} has {size(gpu.free_mib * MIB)} free, other processes hold {size(gpu.used_mib * MIB)} of "
                f"it, and {what}; free it, choose another with CUDA_VISIBLE_DEVICES, or set memory.preflight=false to "
                "try all the same"
            )


def _count(found: list[Gpu] | None) -> int | None:
    return None if found is None else len(found)


def _plan(config: OrbitConfig, command: str) -> Plan | None:
    """The plan; None for a model whose family is not known here, and on a CPU for one that cannot be sized."""
    facts = facts_of(config.model) if config.model.path or config.model.architecture else None
    if facts is None or facts.model_type not in FAMILIES:
        return None
    try:
        model = read_model(config)
    except ConfigError:
        if config.hardware.device is Device.cuda:
            raise
        return None  # what works on a CPU is not refused for a figure that is missing
    return make_plan(config, model=model, trains=command == "train", evaluates=command == "eval")
