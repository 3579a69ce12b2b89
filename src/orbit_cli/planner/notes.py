"""What a plan says besides bytes: how long moving them takes at least, and what was counted how."""

from __future__ import annotations

from orbit_cli.config.schema.memory import Offload, TrainerLayout
from orbit_cli.planner.built import not_built
from orbit_cli.planner.part import BASE, Side, size
from orbit_cli.planner.plan import Phase, Plan
from orbit_cli.planner.shape import Category


def notes(plan: Plan, *, trains: bool = True) -> list[str]:
    """Sentences for the person who reads the plan, the most important first."""
    missing = not_built(plan, trains=trains)
    found = [f"a plan only, these are not built yet: {'; '.join(missing)}"] if missing else []
    hardware, rollout = plan.config.hardware, plan.phases[-1]
    read = _base(rollout, Side.engine) or _base(rollout, Side.trainer)
    if hardware.bandwidth_gb_s and read:
        seconds = read / (hardware.bandwidth_gb_s * 1e9)
        found.append(
            f"a decoding step that touches every weight reads {size(read)} and takes at least {1e3 * seconds:.1f} ms"
        )
    if plan.phases[0].moment:
        found.append(f"training holds most {plan.phases[0].moment}; what its other moments hold is not beside that")
    if plan.config.memory.offload is Offload.swap and hardware.host_gb_s:
        train = plan.phases[0]
        moved = _base(train, Side.trainer) + _base(rollout, Side.engine)
        found.append(
            f"each step moves {size(moved)} per GPU to or from host memory twice: at least "
            f"{2 * moved / (hardware.host_gb_s * 1e9):.1f} s"
        )
    if plan.layout.trainer is TrainerLayout.sharded and hardware.link_gb_s and trains:
        gpus = plan.layout.trainer_gpus
        missing = plan.model.base_bytes * (gpus - 1) / gpus
        found.append(
            f"gathering a sharded base brings {size(missing)} to each GPU per pass: at least "
            f"{missing / (hardware.link_gb_s / 2 * 1e9):.1f} s"
        )
    if plan.model.shape.of(Category.vision):
        found.append("the vision tower is counted on both sides, although a text policy needs none of it")
    return found


def _base(phase: Phase, side: Side) -> int:
    return sum(part.nbytes for part in phase.parts if part.side is side and part.name.startswith(BASE))
