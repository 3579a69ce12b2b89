"""A plan as plain data, for `orbit plan --json`. Bytes are whole numbers; the keys do not change."""

from __future__ import annotations

from typing import Any

from orbit_cli.planner.advice import largest_micro_batch, longest_response, nearest_fit, sequences_at_once
from orbit_cli.planner.built import not_built
from orbit_cli.planner.notes import notes
from orbit_cli.planner.plan import Plan, dtype_bytes


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything that the table shows, and every part with its formula."""
    shape, layout, memory = plan.model.shape, plan.layout, plan.config.memory
    nearest, today = nearest_fit(plan), nearest_fit(plan, runnable=True)
    cache = shape.cache
    return {
        "model": plan.config.model.name,
        "hardware": plan.config.hardware.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "checkpoint_bytes": plan.model.checkpoint_bytes,
        "base_bytes": plan.model.base_bytes,
        "adapter_parameters": plan.adapter_parameters,
        "kv_bytes_per_token": cache.packed_bytes or cache.elements * dtype_bytes(plan.config),
        "kv_pool_bytes_per_token_per_gpu": plan.cache_bytes_per_token,
        "kv_bytes_per_sequence": cache.sequence_bytes,
        "gpus": max(layout.trainer_gpus, layout.engine_gpus) if layout.on_gpu else 0,
        "memory_bytes": plan.memory,
        "budget_bytes": plan.budget,
        "layout": {
            "trainer": str(layout.trainer),
            "trainer_gpus": layout.trainer_gpus,
            "engine": str(layout.engine),
            "engine_gpus": layout.engine_gpus,
            "colocated": layout.colocated,
            "shared_base": memory.shared_base,
            "offload": str(memory.offload),
        },
        "fits": None if plan.fits and plan.budget is None else plan.fits,  # null: the GPU's memory is not known
        "limit": plan.limits[0] if plan.limits else None,
        "limits": plan.limits,
        "phases": {
            phase.name: {
                "total_bytes": phase.nbytes,
                "free_bytes": None if plan.budget is None else plan.budget - phase.nbytes,
                "parts": {part.key: part.nbytes for part in phase.parts},
                "formulas": {part.key: part.formula for part in phase.parts},
            }
            for phase in plan.phases
        },
        "nearest": nearest.overrides if nearest else [],
        "nearest_runnable": today.overrides if today else [],
        "not_built": not_built(plan),
        "longest_response_tokens": longest_response(plan),
        "largest_micro_batch_tokens": largest_micro_batch(plan),
        "sequences_at_once": sequences_at_once(plan),
        "notes": notes(plan),
    }
