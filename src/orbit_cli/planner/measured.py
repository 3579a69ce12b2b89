"""Planned peaks in the form in which a run measures them, so that its memory record can hold both side by side.

A run measures resident memory of its process (the trainer) and of its children (the engine), on a GPU what torch
allocated in its own process, and exactly what base, adapter and gradients take in the trainer.
"""

from __future__ import annotations

from typing import Any

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import OrbitError
from orbit_cli.planner.part import GIB, Side
from orbit_cli.planner.plan import Phase, Plan, dtype_bytes, make_plan

# Phases of a run -> phases of a plan. A published adapter is proved by both sides in turn, as sampling does.
PHASES = {"train": "train", "rollout": "rollout", "eval": "rollout", "sync": "rollout"}


def planned_peaks(config: OrbitConfig, *, trains: bool = True) -> dict[str, Any] | None:
    """{"phases": {phase: {column: GiB}}, "parts": {part: bytes}} for telemetry; None if it cannot be planned."""
    try:
        plan = make_plan(config, trains=trains)
    except OrbitError:  # the run will say what is wrong with its model; its memory record does without a plan
        return None
    by_name = {phase.name: phase for phase in plan.phases}
    phases = {ours: _columns(plan, by_name[theirs]) for ours, theirs in PHASES.items() if theirs in by_name}
    return {"phases": phases, "parts": _parts(plan) if trains else {}}


def _columns(plan: Plan, phase: Phase) -> dict[str, float]:
    if not plan.layout.on_gpu:
        return {"process_gib": phase.of(Side.trainer) / GIB, "children_gib": phase.of(Side.engine) / GIB}
    allocated = sum(p.nbytes for p in phase.parts if p.side is Side.trainer and p.name != "CUDA context")
    return {f"cuda{index}_gib": allocated / GIB for index in range(plan.layout.trainer_gpus)}


def _parts(plan: Plan) -> dict[str, int]:
    """Names and meaning of TrainerModel.memory()."""
    parts = {part.name: part.nbytes for part in plan.phases[0].parts if part.side is Side.trainer}
    packed = sum(round(held.quantised_bytes * plan.layout.trainer_share(held.category)) for held in plan.model.held)
    base = sum(
        round(held.nbytes(dtype_bytes(plan.config)) * plan.layout.trainer_share(held.category))
        for held in plan.model.held
    )
    return {
        "base_packed": packed,
        "base_plain": base - packed,
        "adapter": parts.get("adapter as multiplied", 0) + parts.get("master weights (float32)", 0),
        "adapter_grads": parts.get("gradients", 0),
    }
