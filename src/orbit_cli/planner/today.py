"""What to set so that Orbit can run it today, and the command that shows why."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from orbit_cli.config.schema.memory import MemoryConfig
from orbit_cli.config.schema.system import Device
from orbit_cli.engine.targets import FAMILIES as SERVED
from orbit_cli.errors import ConfigError
from orbit_cli.models.families import FAMILIES as TRAINED
from orbit_cli.planner.advice import Change, Nearest, nearest_fit
from orbit_cli.planner.built import Verdict, not_built, verdict
from orbit_cli.planner.plan import Plan, make_plan

KNOBS = ("trainer_layout", "engine_layout", "shared_base", "colocated", "offload", "routing_replay")
ONE_GPU = Change(values={"hardware.gpus": 1, "engine.tensor_parallel": 1}, why="one GPU, the others stay idle")


def runs_today(plan: Plan, *, trains: bool = True) -> Nearest | None:
    """The nearest config that fits and can be run today; None where this one can, or none is found."""
    kind = plan.model.shape.model_type
    if verdict(plan, trains=trains) is Verdict.runs or kind not in SERVED or (trains and kind not in TRAINED):
        return None
    alone = trains and plan.config.hardware.device is Device.cuda and plan.config.hardware.gpus > 1
    knobs = _knobs(plan)
    for changes in ([knobs], [ONE_GPU], [knobs, ONE_GPU]):
        if (ONE_GPU in changes and not alone) or (knobs in changes and not knobs.values):
            continue
        tried = _changed(plan, changes, trains)
        if tried is not None and not not_built(tried, trains=trains) and (tried.fits or not tried.layout.on_gpu):
            return Nearest(changes=changes, plan=tried)
    return nearest_fit(plan, trains=trains, runnable=True)


def still_missing(plan: Plan, *, trains: bool = True) -> list[str]:
    """Everything that must be built for this config; where it does not fit, for the nearest that fits there too."""
    found, nearest = not_built(plan, trains=trains), None if plan.fits else nearest_fit(plan, trains=trains)
    if nearest is not None and not any("hardware" in change.values for change in nearest.changes):
        found += not_built(nearest.plan, trains=trains)
    return list(dict.fromkeys(found))


def plan_command(command: str, overrides: Sequence[str], more: Sequence[str] = ()) -> str:
    """The `orbit plan` to paste: the given overrides without those of the run itself, later ones in their place.

    >>> plan_command("rollout", ["model=kimi_k26", "hardware=cpu", "run.output=x"], ["hardware=h100x8"])
    'orbit plan --for rollout model=kimi_k26 hardware=h100x8'
    """
    keys = {_key(text) for text in more}
    kept = [text for text in overrides if _key(text) not in keys and not _key(text).startswith("run.")]
    start = ["orbit", "plan", *([] if command == "train" else ["--for", command])]
    return " ".join([*start, *map(shlex.quote, [*kept, *more])])


def _knobs(plan: Plan) -> Change:
    """The knobs of memory that nothing reads yet, back at their defaults."""
    unset, own = MemoryConfig(), plan.config.memory
    values = {f"memory.{name}": getattr(unset, name) for name in KNOBS if getattr(own, name) != getattr(unset, name)}
    return Change(values=values, why="what is built")


def _changed(plan: Plan, changes: list[Change], trains: bool) -> Plan | None:
    """The plan with these changes; None where the layout refuses it."""
    config = plan.config
    for change in changes:
        for key, value in change.values.items():
            section, _, name = key.partition(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    try:
        return make_plan(config, model=plan.model, trains=trains, evaluates=plan.evaluates)
    except ConfigError:
        return None


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]
