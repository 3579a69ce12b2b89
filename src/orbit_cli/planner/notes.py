"""What a plan says besides bytes: how long moving them takes at least, and what was counted how."""

from __future__ import annotations

from orbit_cli.config.schema.base import AdapterKind
from orbit_cli.config.schema.memory import TrainerLayout
from orbit_cli.planner.checkpoint import is_config_alone, own_config
from orbit_cli.planner.part import BASE, Side, size
from orbit_cli.planner.plan import Phase, Plan
from orbit_cli.planner.shape import Category

SHORT = 128  # tokens of a response
SHORTEST_S = 0.0005  # of a decoding step; below it other things count


def notes(plan: Plan, *, trains: bool = True) -> list[str]:
    """Sentences for the person who reads the plan, the most important first."""
    found = [*_folder_notes(plan), *_base_notes(plan), *_host_notes(plan), *_config_notes(plan, trains)]
    found += _costs(plan, trains)
    if plan.phases[0].moment:
        found.append(f"of training the largest moment is counted, {plan.phases[0].moment}; the others need less")
    if plan.model.shape.of(Category.vision):
        where = "on both sides" if trains else "in the engine"
        found.append(f"the vision tower is counted {where}, although a text policy needs none of it")
    return found


def _costs(plan: Plan, trains: bool) -> list[str]:
    """How long moving bytes takes at least."""
    found, hardware, rollout = [], plan.config.hardware, plan.phases[-1]
    if plan.host.parts and hardware.host_gb_s:
        moved = _base(plan.phases[0], Side.trainer) + _base(rollout, Side.engine)
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
    read = _base(rollout, Side.engine) or _base(rollout, Side.trainer)
    if hardware.bandwidth_gb_s and (seconds := read / (hardware.bandwidth_gb_s * 1e9)) > SHORTEST_S:
        found.append(
            f"a decoding step that touches every weight reads {size(read)} and takes at least {1e3 * seconds:.1f} ms"
        )
    return found


def _folder_notes(plan: Plan) -> list[str]:
    """Where the folder is a model that has a config of its own, or lacks the weights."""
    better, found = own_config(plan.config.model), []
    if better:
        found.append(f"{better} has this model's stop tokens, adapter.targets and engine.tensor_parallel")
    if is_config_alone(plan.config.model):
        found.append(f"planned from the config.json of {plan.config.model.path} alone: a run needs its weights there")
    return found


def _base_notes(plan: Plan) -> list[str]:
    """Where the wanted number format is not what the files hold."""
    stored = sorted({name for name in plan.model.rules.formats.values() if name})
    wanted, files, base = plan.config.quantization.format, plan.model.checkpoint_bytes, plan.model.base_bytes
    if wanted == "bf16" and stored:
        return [f"quantization=bf16 takes the files as they are, and these hold {' and '.join(stored)}"]
    if base > files:
        return [f"a base in {wanted} is larger than the {size(files)} of files, which hold fewer bits"]
    return []


def _host_notes(plan: Plan) -> list[str]:
    """What was not checked of the machine's own memory."""
    if not plan.host.parts or plan.host.memory is not None:
        return []
    return [
        f"memory.offload=swap takes {size(plan.host.nbytes)} of the machine's own memory, whose size is not known: set "
        "hardware.host_memory_mib to have it checked"
    ]


def _config_notes(plan: Plan, trains: bool) -> list[str]:
    found, counted = [], plan.lengths
    if trains and plan.model.shape.experts and not plan.config.adapter.expert_targets:
        every = "adapter.expert_targets=[gate_proj,up_proj,down_proj]"
        more = f"routed experts carry no adapter here; '{every}' would adapt them and need far more"
        if plan.config.adapter.kind is AdapterKind.oft:
            more += "; '[gate_proj,up_proj]' with adapter.expert_width=shared needs next to nothing"
        found.append(more)
    if plan.layout.on_gpu and counted.response <= SHORT:
        found.append(
            f"responses are short here ({counted.response_key}={counted.response}); experiment=long_answers has the "
            "lengths of reasoning"
        )
    return found


def _base(phase: Phase, side: Side) -> int:
    return sum(part.nbytes for part in phase.parts if part.side is side and part.name.startswith(BASE))
