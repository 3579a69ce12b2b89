"""Planned peaks in the form in which a run measures them, so that its memory record can hold both side by side.

A run measures resident memory of its process (the trainer) and of its children (the engine), and exactly what base,
adapter and gradients take in the trainer. On a GPU five figures of each phase have a plan:

    cuda0_gib           what tensors of our own process took at the peak (torch's allocated)
    cuda0_reserved_gib  that and what its allocator kept (torch's reserved)
    cuda0_engine_gib, cuda0_engine_reserved_gib   the same of the engine's first process, since its start
    cuda0_used_gib      all of the GPU that is not free: both processes, contexts, and whoever else is there

`about` says so in the record.
"""

from __future__ import annotations

from typing import Any

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import OrbitError
from orbit_cli.planner.adapters import sites
from orbit_cli.planner.gpu_training import Moments
from orbit_cli.planner.part import GIB, Side
from orbit_cli.planner.plan import CACHED, CONTEXT, Phase, Plan, dtype_bytes, make_plan

ON_GPU = (
    "cudaN_gib: tensors of this process at the peak; cudaN_reserved_gib: with what its allocator keeps; "
    "cuda0_engine_gib and cuda0_engine_reserved_gib: the same of the engine's first process, since its start; "
    "cudaN_used_gib: all of the GPU that is not free at the end of the phase, both contexts among it. Lengths are "
    "planned at their limits."
)
ON_CPU = (
    "process_gib: resident memory of this process at the peak; children_gib: the engine's processes at the end of the "
    "phase, shared pages counted in each. Their parts cannot be told apart, but for those under parts. Lengths are "
    "planned at their limits."
)
# Phases of a run -> phases of a plan. A published adapter is proved by both sides in turn, as sampling does.
PHASES = {"train": "train", "rollout": "rollout", "eval": "rollout", "sync": "rollout"}


def planned_peaks(config: OrbitConfig, *, trains: bool = True, evaluates: bool = False) -> dict[str, Any] | None:
    """{"phases": {phase: {column: GiB}}, "parts": {part: bytes}, "about": text} for telemetry; None if it cannot be
    planned."""
    try:
        plan = make_plan(config, trains=trains, evaluates=evaluates)
    except OrbitError:  # the run will say what is wrong with its model; its memory record does without a plan
        return None
    by_name = {phase.name: phase for phase in plan.phases}
    phases = {ours: _columns(plan, by_name[theirs]) for ours, theirs in PHASES.items() if theirs in by_name}
    if trains and plan.layout.on_gpu:
        for index in range(plan.layout.trainer_gpus):
            phases["sync"][f"cuda{index}_gib"] += _building(plan) / GIB
    about = ON_GPU if plan.layout.on_gpu else ON_CPU
    return {"phases": phases, "parts": _parts(plan) if trains else {}, "about": about}


def _columns(plan: Plan, phase: Phase) -> dict[str, float]:
    if not plan.layout.on_gpu:
        return {"process_gib": phase.of(Side.trainer) / GIB, "children_gib": phase.of(Side.engine) / GIB}
    own = {part.name: part.nbytes for part in phase.parts if part.side is Side.trainer and part.name != CONTEXT}
    reserved = sum(own.values())
    allocated = reserved - sum(nbytes for name, nbytes in own.items() if name.startswith(CACHED))
    columns = {"": allocated, "_reserved": reserved, "_used": phase.nbytes}
    found = {
        f"cuda{index}{what}_gib": nbytes / GIB
        for index in range(plan.layout.trainer_gpus)
        for what, nbytes in columns.items()
    }
    engine = sum(part.nbytes for part in phase.parts if part.side is Side.engine and part.name != CONTEXT)
    return found | ({"cuda0_engine_gib": engine / GIB, "cuda0_engine_reserved_gib": engine / GIB} if engine else {})


def _building(plan: Plan) -> int:
    """Before a version is published its rotations are built."""
    return Moments(
        config=plan.config,
        model=plan.model,
        layout=plan.layout,
        lengths=plan.lengths,
        sites=sites(plan.model.shape, plan.config.adapter),
        dtype_bytes=dtype_bytes(plan.config),
    ).building()


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
