"""A plan as plain data, for `orbit plan --json`; docs/planning.md says what each key means. The keys do not change."""

from __future__ import annotations

from typing import Any

from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.built import Verdict, not_built, verdict
from orbit_cli.planner.changes import Change
from orbit_cli.planner.largest import (
    largest_micro_batch,
    longest_limit,
    longest_response,
    response_values,
    sequences_at_once,
)
from orbit_cli.planner.notes import notes
from orbit_cli.planner.plan import Plan, dtype_bytes
from orbit_cli.planner.today import runs_today


def to_json(plan: Plan, *, command: str = "train") -> dict[str, Any]:
    """Everything that the table shows, and every part with its formula."""
    shape, layout, memory, trains = plan.model.shape, plan.layout, plan.config.memory, command == "train"
    answer = verdict(plan, trains=trains)
    nearest, today = nearest_fit(plan, trains=trains), runs_today(plan, trains=trains)
    cache, known = shape.cache, plan.budget is not None
    return {
        "for": command,
        "model": plan.config.model.name,
        "hardware": plan.config.hardware.name,
        "verdict": str(answer),
        "fits": None if plan.fits and not known else plan.fits,
        "runnable": answer in (Verdict.runs, Verdict.unknown),
        "not_built": not_built(plan, trains=trains),
        "limit": plan.limits[0] if plan.limits else None,
        "limits": plan.limits,
        "nearest": nearest.overrides if nearest else [],
        "nearest_runnable": today.overrides if today else [],
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "checkpoint_bytes": plan.model.checkpoint_bytes,
        "base_bytes": plan.model.base_bytes,
        "adapter_parameters": plan.adapter_parameters,
        "kv_bytes_per_token": cache.packed_bytes or cache.elements * dtype_bytes(plan.config),
        "kv_pool_bytes_per_token_per_gpu": plan.cache_bytes_per_token,
        "kv_bytes_per_sequence": cache.sequence_bytes,
        "gpus": max(layout.trainer_gpus if trains else 0, layout.engine_gpus) if layout.on_gpu else 0,
        "memory_bytes": plan.memory,
        "budget_bytes": plan.budget,
        "certain_bytes": plan.certain_bytes,
        "layout": {
            "trainer": str(layout.trainer),
            "trainer_gpus": layout.trainer_gpus,
            "engine": str(layout.engine),
            "engine_gpus": layout.engine_gpus,
            "colocated": layout.colocated,
            "shared_base": memory.shared_base,
            "offload": str(memory.offload),
        },
        "phases": {
            phase.name: {
                "total_bytes": phase.nbytes,
                "free_bytes": plan.budget - phase.nbytes if known else None,
                "parts": {part.key: part.nbytes for part in phase.parts},
                "formulas": {part.key: part.formula for part in phase.parts},
            }
            for phase in plan.phases
        },
        "host": {
            "memory_bytes": plan.host.memory,
            "total_bytes": plan.host.nbytes,
            "parts": {part.key: part.nbytes for part in plan.host.parts},
            "formulas": {part.key: part.formula for part in plan.host.parts},
        }
        if plan.host.parts
        else None,
        "longest_response_tokens": (longest_response(plan, trains=trains) or None) if known else None,
        "longest_response_overrides": _longest(plan, trains) if known else [],
        "longest_response_limit": _longest_limit(plan, trains) if known else None,
        "largest_micro_batch_tokens": (largest_micro_batch(plan) or None) if known and trains else None,
        "sequences_at_once": sequences_at_once(plan) if known else None,
        "notes": notes(plan, trains=trains),
    }


KEYS = (
    "for",
    "model",
    "hardware",
    "verdict",
    "fits",
    "runnable",
    "not_built",
    "limit",
    "limits",
    "nearest",
    "nearest_runnable",
    "parameters",
    "active_parameters",
    "checkpoint_bytes",
    "base_bytes",
    "adapter_parameters",
    "kv_bytes_per_token",
    "kv_pool_bytes_per_token_per_gpu",
    "kv_bytes_per_sequence",
    "gpus",
    "memory_bytes",
    "budget_bytes",
    "certain_bytes",
    "layout",
    "phases",
    "host",
    "longest_response_tokens",
    "longest_response_overrides",
    "longest_response_limit",
    "largest_micro_batch_tokens",
    "sequences_at_once",
    "notes",
)


def _longest(plan: Plan, trains: bool) -> list[str]:
    """What to set for the longest response; empty if none fits."""
    tokens = longest_response(plan, trains=trains)
    return Change(values=response_values(plan, tokens, trains=trains), why="").overrides if tokens else []


def _longest_limit(plan: Plan, trains: bool) -> str | None:
    tokens = longest_response(plan, trains=trains)
    return longest_limit(plan, tokens, trains=trains) if tokens else None


def refused_json(reason: str, *, command: str = "train") -> dict[str, Any]:
    """The same keys for a combination that cannot be laid out: null but for the answer and its reason."""
    answer = {"for": command, "verdict": "refused", "fits": False, "runnable": False, "limit": reason}
    return dict.fromkeys(KEYS) | answer | {"limits": [reason], "not_built": [], "nearest": [], "nearest_runnable": []}
