"""The first thing that train, rollout and eval do: refuse what cannot work, in one sentence, before anything is loaded.

On a GPU a plan that does not fit is refused. On a CPU only what is certain is: base and adapter that exceed the
machine's memory; everything else there is an upper bound, and memory that is never touched costs nothing.
"""

from __future__ import annotations

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import ModelSource
from orbit_cli.config.schema.system import Device
from orbit_cli.errors import ConfigError
from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.built import not_built
from orbit_cli.planner.checkpoint import facts_of
from orbit_cli.planner.families import FAMILIES
from orbit_cli.planner.gpus import Gpu, usable_gpus
from orbit_cli.planner.part import size
from orbit_cli.planner.plan import MIB, WORK, Plan, make_plan


def preflight(config: OrbitConfig, *, trains: bool) -> Plan | None:
    """Plan and refuse. None where the model cannot be planned: then the run itself says what is wrong with it.

    Raises ConfigError or CheckpointError (exit code 2): no checkpoint, another model's folder, missing GPUs, memory.
    """
    _need_checkpoint(config, trains)
    if not config.memory.preflight:
        return None
    plan = _plan(config, trains)
    found = usable_gpus() if config.hardware.device is Device.cuda else None
    if plan is None:
        require_gpus(config, _count(found))
        return None
    problem = too_large(plan, trains=trains)
    if problem:
        raise ConfigError(problem)
    require_gpus(config, _count(found))
    _require_memory(plan, found or [])
    missing = not_built(plan, trains=trains) if plan.layout.on_gpu else []
    if missing:
        raise ConfigError(
            f"{config.model.name} on hardware={config.hardware.name} needs {missing[0]}, which is not built yet; set a "
            "model, hardware or layout that `orbit plan` says can be run"
        )
    return plan


def too_large(plan: Plan, *, trains: bool) -> str | None:
    """Why the plan cannot work and the nearest one that can, in one sentence; None if it can."""
    if not plan.layout.on_gpu:
        if plan.memory is None or plan.certain_bytes <= plan.memory:
            return None
        reason = (
            f"base and adapter alone need {size(plan.certain_bytes)} and this machine has {size(plan.memory)} of memory"
        )
    elif plan.fits:
        return None
    else:
        reason = plan.limits[0]
    return (
        f"{plan.config.model.name} does not fit hardware={plan.config.hardware.name}: {reason}; {remedy(plan, trains)}"
    )


def remedy(plan: Plan, trains: bool = True) -> str:
    """What to set, preferring what can be run today."""
    today = nearest_fit(plan, trains=trains, runnable=True)
    nearest = today or nearest_fit(plan, trains=trains)
    if nearest is None:
        return "nothing in reach makes it fit; choose a smaller model (`orbit plan` shows every part)"
    missing = not_built(nearest.plan, trains=trains)
    but = f", which needs {missing[0]}, not built yet" if missing else ""
    return f"nearest that fits: {' '.join(nearest.overrides)}{but} (`orbit plan` shows every part)"


def require_gpus(config: OrbitConfig, found: int | None) -> None:
    """Refuse hardware with more GPUs than were `found` (None: that cannot be told). Raises ConfigError."""
    needed = max(1, config.hardware.gpus)
    if config.hardware.device is Device.cuda and found is not None and found < needed:
        raise ConfigError(
            f"hardware={config.hardware.name} needs {needed} GPU(s), this machine shows {found}; "
            "set hardware=cpu or run where the GPUs are"
        )


def _require_memory(plan: Plan, found: list[Gpu]) -> None:
    """Refuse GPUs that are smaller than the plan's, or fuller than it can bear. Raises ConfigError."""
    hardware, need = plan.config.hardware, plan.peak.nbytes
    what = f"{WORK[plan.peak.name]} needs {size(need)}"
    for number, gpu in enumerate(found[: max(1, hardware.gpus)]):
        if gpu.total_mib is not None and gpu.total_mib * MIB * (1 - plan.config.memory.headroom) < need:
            raise ConfigError(
                f"hardware={hardware.name} counts on GPUs of {size(plan.memory or need)}, but GPU {number} here has "
                f"{size(gpu.total_mib * MIB)} and {what}; see what fits with `orbit plan` and "
                f"hardware.memory_mib={gpu.total_mib}"
            )
        if gpu.free_mib is not None and gpu.free_mib * MIB < need:
            raise ConfigError(
                f"GPU {number} has {size(gpu.free_mib * MIB)} free, other processes hold {size(gpu.used_mib * MIB)} of "
                f"it, and {what}; free it, choose another with CUDA_VISIBLE_DEVICES, or set memory.preflight=false to "
                "try all the same"
            )


def _count(found: list[Gpu] | None) -> int | None:
    return None if found is None else len(found)


def _need_checkpoint(config: OrbitConfig, trains: bool) -> None:
    """Refuse a model whose files are not named, together with what else stands in the way."""
    model = config.model
    if model.source is not ModelSource.checkpoint:
        return
    if model.path:
        facts_of(model)  # the folder is that model, or this says which field differs
        return
    if model.repository is None:
        raise ConfigError("model.source=checkpoint needs model.path; set it to a Hugging Face checkpoint folder")
    plan = make_plan(config, trains=trains)
    problem = (
        f"model.path is not set, and the {size(plan.model.checkpoint_bytes)} of {model.name} are not part of Orbit; "
        f"download {model.repository} and set model.path=FOLDER"
    )
    also = too_large(plan, trains=trains)
    if also:
        raise ConfigError(f"{problem}; moreover {also}")
    found, needed = _count(usable_gpus()) if plan.layout.on_gpu else None, max(1, config.hardware.gpus)
    if found is not None and found < needed:
        name = config.hardware.name
        raise ConfigError(
            f"{problem}; moreover hardware={name} needs {needed} GPU(s) and this machine shows {found}: run it where "
            "they are"
        )
    raise ConfigError(f"{problem} (then {model.name} fits hardware={config.hardware.name})")


def _plan(config: OrbitConfig, trains: bool) -> Plan | None:
    """The plan; None for a model whose family is not known here, and on a CPU for whatever cannot be planned."""
    facts = facts_of(config.model) if config.model.path or config.model.architecture else None
    if facts is None or facts.model_type not in FAMILIES:
        return None
    try:
        return make_plan(config, trains=trains)
    except ConfigError:
        if config.hardware.device is Device.cuda:
            raise
        return None  # what works on a CPU is not refused for a figure that is missing
