"""A change of a config: its overrides, why they help, how much harm they do, and the plan that they lead to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import ConfigError
from orbit_cli.planner.machine import gpu_machines
from orbit_cli.planner.model import read_model
from orbit_cli.planner.plan import Plan, make_plan


class Harm(IntEnum):
    """What a change does to the run."""

    none = 0  # slower at most: what is sampled and learned stays the same
    lengths = 1  # responses are cut earlier
    learning = 2  # another base or a smaller adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Overrides that belong together, with what they do.

    >>> Change(values={"memory.shared_base": True}, why="one copy of the base").overrides
    ['memory.shared_base=true']
    """

    values: dict[str, Any]  # "section.field" -> value; "hardware" and "quantization" name a group's option
    why: str
    harm: Harm = Harm.none
    implied: dict[str, Any] = field(default_factory=dict)  # what the config sets by itself when these are set
    cached: int = 0  # sequences for which engine.max_total_tokens is set here; shorter responses need less of it

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={_shown(value)}" for key, value in self.values.items()]


def merged(chosen: list[Change]) -> list[Change]:
    """The same changes without what a later one sets again.

    >>> first, then = Change(values={"a.b": 2, "a.c": 1}, why=""), Change(values={"a.b": 1}, why="")
    >>> [one.overrides for one in merged([first, then])]
    [['a.c=1'], ['a.b=1']]
    """
    found: list[Change] = []
    for number, change in enumerate(chosen):
        later = {key for after in chosen[number + 1 :] for key in after.values}
        values = {key: value for key, value in change.values.items() if key not in later}
        found += [replace(change, values=values)] if values else []
    return found


def tried(plan: Plan, chosen: list[Change], *, trains: bool = True) -> Plan | None:
    """The plan with these changes; None for a combination that the schema or the layout refuses."""
    config = _apply(plan.config, chosen)
    if config is None:
        return None
    same_base = config.quantization == plan.config.quantization
    try:
        if not same_base:
            return make_plan(config, model=read_model(config), trains=trains, evaluates=plan.evaluates)
        return make_plan(config, like=plan, trains=trains, evaluates=plan.evaluates)
    except ConfigError:
        return None


def _apply(config: OrbitConfig, chosen: list[Change]) -> OrbitConfig | None:
    """The config with these changes; None where the schema's own checks refuse it."""
    sections: dict[str, dict[str, Any]] = {}
    try:
        for key, value in (pair for change in chosen for pair in (change.values | change.implied).items()):
            section, _, name = key.partition(".")
            if key == "hardware":
                config = replace(config, hardware=dict(gpu_machines())[value])
            elif key == "quantization":
                sections.setdefault(key, {})["format"] = NumberFormat(value)
            else:
                sections.setdefault(section, {})[name] = value
        parts = {section: replace(getattr(config, section), **values) for section, values in sections.items()}
        return replace(config, **parts)
    except ConfigError:
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
