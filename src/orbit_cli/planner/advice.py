"""What to change: the nearest config that fits, the longest response, the largest batch. Each is tried, never guessed.

Changes are tried from the least to the most intrusive: alone, then together, and what turns out not to be needed is
left out again. Larger hardware comes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import AdapterKind, NumberFormat
from orbit_cli.config.schema.memory import EngineLayout, Offload, TrainerLayout
from orbit_cli.config.schema.system import Device, HardwareConfig
from orbit_cli.errors import ConfigError
from orbit_cli.planner.built import not_built
from orbit_cli.planner.machine import gpu_machines, whole_memory
from orbit_cli.planner.model import read_model
from orbit_cli.planner.part import size
from orbit_cli.planner.plan import Plan, make_plan

PAGE = 4096  # caches are suggested in multiples of this many tokens
SHORTER = (4096, 1024)  # tokens of a response
SMALL_BLOCK, SMALL_RANK, SHORT_CHUNK, FEW_RUNNING = 16, 8, 128, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Overrides that belong together, with what they do.

    >>> Change(values={"memory.shared_base": True}, why="one copy of the base").overrides
    ['memory.shared_base=true']
    """

    values: dict[str, Any]  # "section.field" -> value; "hardware" and "quantization" name a group's option
    why: str

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={_shown(value)}" for key, value in self.values.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """Changes, and the plan that they lead to."""

    changes: list[Change]
    plan: Plan

    @property
    def overrides(self) -> list[str]:
        return [override for change in self.changes for override in change.overrides]


def nearest_fit(plan: Plan, *, trains: bool = True, runnable: bool = False) -> Nearest | None:
    """The fewest, least intrusive changes with which the plan fits; None if it fits already or nothing helps.

    `runnable` leaves out what can be planned but not run yet (built.py).
    """
    if _accepts(plan, trains, runnable):
        return None
    found = _fitting(plan, trains, runnable)
    if found:
        return found
    for name, hardware in larger_hardware(plan):
        values: dict[str, Any] = {"hardware": name}
        if plan.config.hardware.gpus == 1 < hardware.gpus:
            values["engine.tensor_parallel"] = hardware.gpus
        memory = whole_memory(hardware) / hardware.gpus
        moved = Change(values=values, why=f"{hardware.gpus} GPU{'s' * (hardware.gpus > 1)} of {size(memory)}")
        there = _tried(plan, [moved], trains)
        if there is None:
            continue
        if _accepts(there, trains, runnable):
            return Nearest(changes=[moved], plan=there)
        more = _fitting(there, trains, runnable)
        if more:
            return Nearest(changes=[moved, *more.changes], plan=more.plan)
    return None


def changes(plan: Plan) -> Iterator[Change]:
    """Everything that could make this plan smaller, the least intrusive first."""
    config, counted = plan.config, plan.lengths
    on_gpu, gpus = config.hardware.device is Device.cuda, max(config.hardware.gpus, 1)
    needed = _pages(counted.in_flight)
    pool = config.engine.max_total_tokens
    if plan.model.shape.longest and counted.longest > plan.model.shape.longest:
        yield _within(plan.model.shape.longest, config)
    if pool is not None and pool < counted.longest:
        yield Change(values={"engine.max_total_tokens": needed}, why="a cache that holds a whole sequence")
    elif (on_gpu and pool is None) or (pool or 0) > needed:
        yield Change(values={"engine.max_total_tokens": needed}, why="a cache for what is in flight and no more")
    if not config.trainer.activation_checkpointing:
        yield Change(values={"trainer.activation_checkpointing": True}, why="recompute activations")
    if config.trainer.micro_batch_tokens > counted.longest:
        yield Change(values={"trainer.micro_batch_tokens": counted.longest}, why="one sequence per micro-batch")
    if config.trainer.logprob_chunk_tokens > SHORT_CHUNK:
        yield Change(values={"trainer.logprob_chunk_tokens": SHORT_CHUNK}, why="fewer logits at a time")
    if config.engine.mem_fraction_static < 0.9:
        yield Change(values={"engine.mem_fraction_static": 0.9}, why="let the engine reserve more of the GPU")
    if counted.running > FEW_RUNNING and (pool or counted.in_flight) > FEW_RUNNING * counted.longest:
        fewer = {"engine.max_running_requests": FEW_RUNNING}
        fewer["engine.max_total_tokens"] = _pages(FEW_RUNNING * counted.longest)
        yield Change(values=fewer, why="fewer tokens in flight")
    yield from _smaller_adapters(plan)
    if on_gpu and gpus > 1 and config.engine.tensor_parallel < gpus:
        yield Change(values={"engine.tensor_parallel": gpus}, why="the engine on all GPUs")
    yield from _smaller_base(plan)
    yield from _layouts(plan, gpus)
    for tokens in SHORTER:
        if config.rollout.max_new_tokens > tokens:
            longest = config.rollout.max_prompt_tokens + tokens * config.environment.max_turns
            values: dict[str, Any] = {"rollout.max_new_tokens": tokens}
            if config.trainer.micro_batch_tokens > longest:
                values["trainer.micro_batch_tokens"] = longest
            yield Change(values=values, why="shorter responses")


def longest_response(plan: Plan, *, trains: bool = True) -> int:
    """Largest rollout.max_new_tokens with which the plan fits, all else equal; 0 if not even 1 does."""
    most = (plan.model.shape.longest or 1 << 20) - plan.config.rollout.max_prompt_tokens
    return _largest(plan, "rollout.max_new_tokens", max(most, 1), trains)


def largest_micro_batch(plan: Plan) -> int:
    """Largest trainer.micro_batch_tokens with which the plan fits, up to a whole step; 0 if none does."""
    return _largest(plan, "trainer.micro_batch_tokens", plan.lengths.samples * plan.lengths.longest, True)


def sequences_at_once(plan: Plan) -> int:
    """Sequences of full length that the cache of one GPU would hold if it took what is left; 0 if nothing is."""
    if plan.budget is None or not plan.cache_bytes_per_token:
        return 0
    phase = next(phase for phase in plan.phases if phase.name == "rollout")
    kept = sum(part.nbytes for part in phase.parts if part.name != "KV cache")
    return max(int((plan.budget - kept) / plan.cache_bytes_per_token) // plan.lengths.longest, 0)


def larger_hardware(plan: Plan) -> list[tuple[str, HardwareConfig]]:
    """Machines of conf/hardware with more memory than this plan's, the smallest first."""
    have = (plan.memory or 0) * max(plan.config.hardware.gpus, 1) if plan.layout.on_gpu else 0
    return [(name, hw) for name, hw in gpu_machines() if whole_memory(hw) > have]


def _within(positions: int, config: OrbitConfig) -> Change:
    """Lengths that the model has positions for; prompts are shortened only where they alone are too long."""
    prompt, turns = config.rollout.max_prompt_tokens, config.environment.max_turns
    values: dict[str, Any] = {}
    if prompt + turns > positions:
        values["rollout.max_prompt_tokens"] = prompt = positions // 2
    values["rollout.max_new_tokens"] = max((positions - prompt) // turns, 1)
    return Change(values=values, why="lengths that the model has positions for")


def _smaller_adapters(plan: Plan) -> Iterator[Change]:
    adapter = plan.config.adapter
    if plan.config.engine.live_versions > 2:
        yield Change(values={"engine.live_versions": 2}, why="fewer adapter slots")
    if adapter.kind is AdapterKind.oft and adapter.block_size > SMALL_BLOCK:
        yield Change(values={"adapter.block_size": SMALL_BLOCK}, why="a smaller adapter")
    if adapter.kind is AdapterKind.lora and adapter.rank > SMALL_RANK:
        yield Change(values={"adapter.rank": SMALL_RANK}, why="a smaller adapter")
    if adapter.expert_targets and adapter.targets:
        yield Change(values={"adapter.expert_targets": []}, why="no adapters on routed experts")


def _smaller_base(plan: Plan) -> Iterator[Change]:
    if set(plan.model.rules.formats.values()) <= {"", "fp8"}:
        yield Change(values={"quantization": "int4"}, why="a 4-bit base")


def _layouts(plan: Plan, gpus: int) -> Iterator[Change]:
    memory, shape = plan.config.memory, plan.model.shape
    split = TrainerLayout.expert_parallel if shape.experts and shape.experts % gpus == 0 else TrainerLayout.sharded
    if memory.colocated and not memory.shared_base and memory.offload is Offload.none:
        values: dict[str, Any] = {"memory.shared_base": True}
        if memory.engine_layout is not EngineLayout.auto or plan.config.engine.tensor_parallel != gpus:
            values["memory.engine_layout"] = EngineLayout.auto
            values["engine.tensor_parallel"] = gpus
        if memory.trainer_layout is TrainerLayout.sharded:
            values["memory.trainer_layout"] = TrainerLayout.auto
        yield Change(values=values, why="one copy of the base")
    if gpus > 1 and plan.layout.trainer is TrainerLayout.replicated:
        yield Change(values={"memory.trainer_layout": split}, why="a trainer that splits its base")
    elif gpus > 1 and plan.layout.trainer is TrainerLayout.expert_parallel and not memory.shared_base:
        yield Change(values={"memory.trainer_layout": TrainerLayout.sharded}, why="a trainer that splits everything")
    if memory.colocated and memory.offload is Offload.none and not memory.shared_base and plan.layout.on_gpu:
        yield Change(values={"memory.offload": Offload.swap}, why="the copy that is not at work waits in host memory")


def _fitting(plan: Plan, trains: bool, runnable: bool) -> Nearest | None:
    """One change that is enough, or the smallest set that is."""

    def good(chosen: list[Change]) -> Plan | None:
        tried = _tried(plan, chosen, trains)
        return tried if tried is not None and _accepts(tried, trains, runnable) else None

    options = list(changes(plan))
    for option in options:
        if (then := good([option])) is not None:
            return Nearest(changes=[option], plan=then)
    chosen: list[Change] = []
    for option in options:
        more = [*chosen, option]
        if (
            _clash(chosen, option)
            or _tried(plan, more, trains) is None
            or (runnable and _unbuilt(plan, option, trains))
        ):
            continue
        chosen = more
        if good(chosen) is not None:
            break
    for option in list(reversed(chosen)):
        without = [one for one in chosen if one is not option]
        if without and good(without) is not None:
            chosen = without
    found = good(chosen)
    return Nearest(changes=chosen, plan=found) if found is not None else None


def _accepts(plan: Plan, trains: bool, runnable: bool) -> bool:
    return plan.fits and not (runnable and not_built(plan, trains=trains))


def _unbuilt(plan: Plan, option: Change, trains: bool) -> bool:
    """Whether this change alone brings in something that cannot be run yet."""
    tried = _tried(plan, [option], trains)
    return tried is not None and len(not_built(tried, trains=trains)) > len(not_built(plan, trains=trains))


def _clash(chosen: list[Change], option: Change) -> bool:
    """Whether a change would set again what an earlier one set, in a way that undoes it."""
    exclusive = {"memory.shared_base", "memory.offload", "memory.trainer_layout"}
    taken = {key for change in chosen for key in change.values}
    return bool(taken & exclusive and exclusive & set(option.values))


def _fits(plan: Plan, chosen: list[Change], trains: bool) -> bool:
    tried = _tried(plan, chosen, trains)
    return tried is not None and tried.fits


def _tried(plan: Plan, chosen: list[Change], trains: bool) -> Plan | None:
    """The plan with these changes; None for a combination that the schema or the layout refuses."""
    config = _apply(plan.config, chosen)
    if config is None:
        return None
    same_base = config.quantization == plan.config.quantization
    try:
        return make_plan(config, model=plan.model if same_base else read_model(config), trains=trains)
    except ConfigError:
        return None


def _apply(config: OrbitConfig, chosen: list[Change]) -> OrbitConfig | None:
    """The config with these changes; None where the schema's own checks refuse it."""
    try:
        for change in chosen:
            for key, value in change.values.items():
                config = _set(config, key, value)
    except ConfigError:
        return None
    return config


def _set(config: OrbitConfig, key: str, value: Any) -> OrbitConfig:
    if key == "hardware":
        hardware = dict(gpu_machines())[value]
        ranks, gpus = config.engine.tensor_parallel, config.hardware.gpus
        spans = ranks == gpus and gpus != 1  # models that are made for a whole machine have ${hardware.gpus} there
        engine = replace(config.engine, tensor_parallel=hardware.gpus) if spans else config.engine
        return replace(config, hardware=hardware, engine=engine)
    if key == "quantization":
        return replace(config, quantization=replace(config.quantization, format=NumberFormat(value)))
    section, _, name = key.partition(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def _largest(plan: Plan, key: str, most: int, trains: bool) -> int:
    """Largest value from 1 to `most` with which the plan fits; more never needs less."""

    def fits(value: int) -> bool:
        return _fits(plan, [Change(values={key: value}, why="")], trains)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
