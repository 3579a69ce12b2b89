"""What can be planned but not run yet. `orbit plan` says so beside its figures, `orbit train` refuses it.

Whoever builds one of these takes its entry out here.
"""

from __future__ import annotations

from orbit_cli.config.schema.memory import EngineLayout, Offload, TrainerLayout
from orbit_cli.models.families import FAMILIES
from orbit_cli.planner.plan import Plan


def not_built(plan: Plan, *, trains: bool = True) -> list[str]:
    """What this plan uses that does not exist yet, each as the start of a sentence; empty if it can run."""
    memory, layout = plan.config.memory, plan.layout
    found = []
    if trains and plan.model.shape.model_type not in FAMILIES:
        found.append(f"a trainer for {plan.model.shape.model_type}")
    if trains and layout.trainer is not TrainerLayout.replicated:
        found.append(f"a trainer that spreads its base over GPUs (trainer layout {layout.trainer})")
    if layout.engine is EngineLayout.expert_parallel:
        found.append("an engine with its experts spread over GPUs (engine layout expert_parallel)")
    if trains and memory.shared_base:
        found.append("one base for trainer and engine (memory.shared_base)")
    if trains and memory.offload is not Offload.none:
        found.append(f"offloading (memory.offload={memory.offload})")
    if trains and not memory.colocated:
        found.append("trainer and engine on GPUs of their own (memory.colocated=false)")
    if trains and memory.routing_replay:
        found.append("routing replay (memory.routing_replay)")
    return found
