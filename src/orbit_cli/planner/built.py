"""What can be planned but not run yet: `orbit plan` says it beside its figures, train, rollout and eval refuse it.

Whoever builds one of these takes its entry out here.
"""

from __future__ import annotations

from enum import StrEnum

from orbit_cli.config.schema.memory import EngineLayout, Offload, TrainerLayout
from orbit_cli.engine.targets import FAMILIES as SERVED
from orbit_cli.models.families import FAMILIES as TRAINED
from orbit_cli.planner.plan import Plan

A_TRAINER, AN_ENGINE = "a trainer for", "an engine for"  # begin what is missing for a whole model type


class Verdict(StrEnum):
    """The answer of a plan."""

    runs = "runs"  # it fits, and all that it needs is there
    not_built = "not built"  # it fits, and something that it needs is not built yet
    too_large = "does not fit"
    unknown = "cannot be told"  # hardware.memory_mib is not set


def verdict(plan: Plan, *, trains: bool = True) -> Verdict:
    """The one answer from which text, table, JSON and exit code are made."""
    if not plan.fits:
        return Verdict.too_large
    if not_built(plan, trains=trains):
        return Verdict.not_built
    return Verdict.unknown if plan.budget is None else Verdict.runs


def not_built(plan: Plan, *, trains: bool = True) -> list[str]:
    """What this plan needs that does not exist yet, as nouns for "it needs ..."; empty if it can run.

    Knobs count wherever they are set: nothing reads them, on a CPU, on one GPU or for sampling alone either.
    """
    memory, layout, kind = plan.config.memory, plan.layout, plan.model.shape.model_type
    found = []
    if trains and kind not in TRAINED:
        found.append(f"{A_TRAINER} {plan.called}")
    if kind not in SERVED:
        found.append(f"{AN_ENGINE} {plan.called}")
    if memory.trainer_layout in (TrainerLayout.expert_parallel, TrainerLayout.sharded) or (
        trains and layout.trainer is not TrainerLayout.replicated
    ):
        found.append("a trainer that splits its base over GPUs")
    elif trains and layout.trainer_gpus > 1:
        found.append("a trainer on more than one GPU")
    if layout.engine is EngineLayout.expert_parallel:
        found.append("an engine that splits routed experts over GPUs")
    elif layout.engine is EngineLayout.replicated and layout.engine_gpus > 1:
        found.append("an engine with a whole base on each of its GPUs")
    if memory.shared_base:
        found.append("one base for trainer and engine (memory.shared_base)")
    if memory.offload is not Offload.none:
        found.append(f"bases that wait in host memory (memory.offload={memory.offload})")
    if not memory.colocated:
        found.append("trainer and engine on GPUs of their own (memory.colocated=false)")
    if memory.routing_replay:
        found.append("routing replay (memory.routing_replay)")
    return found


def without_model(things: list[str]) -> list[str]:
    """Of what is missing, the trainer and the engine without which nothing of this model type runs."""
    return [thing for thing in things if thing.startswith((A_TRAINER, AN_ENGINE))]


def listed(things: list[str]) -> str:
    """In words.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things)
