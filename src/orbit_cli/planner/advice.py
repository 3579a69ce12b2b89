"""What to change so that a plan fits: the nearest config. Each suggestion is tried, never guessed.

Changes are tried by the harm that they do: first those with which the run samples and learns the same, then shorter
responses, as long as they can be, then what changes learning, and last another machine. Within each, one change that is
enough is preferred to several, and of several those that turn out not to be needed are left out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orbit_cli.config.schema.base import AdapterKind, ExpertWidth
from orbit_cli.config.schema.memory import EngineLayout, Offload, TrainerLayout
from orbit_cli.config.schema.system import Device, HardwareConfig
from orbit_cli.engine.arguments import CPU_TOKENS
from orbit_cli.models.families import FAMILIES as TRAINED
from orbit_cli.planner.built import not_built
from orbit_cli.planner.changes import Change, Harm, merged, tried
from orbit_cli.planner.largest import longest_response, pages, response_values
from orbit_cli.planner.lengths import held_at_once
from orbit_cli.planner.machine import gpu_machines, machine_of, whole_memory
from orbit_cli.planner.part import size
from orbit_cli.planner.plan import Plan

SHAREABLE = {"gate_proj", "up_proj"}  # projections of experts that can share a rotation
SMALL_BLOCK, SMALL_RANK, SHORT_CHUNK = 16, 8, 128
FEWEST = 128  # tokens: no response is suggested to be shorter
HALF, LEAST = 2, 16  # shorter responses alone keep half of their length, together with other changes a 16th
SPARE = 0.95  # a change that gains less than a 20th of the length is not needed for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """Changes, and the plan that they lead to."""

    changes: list[Change]
    plan: Plan

    @property
    def overrides(self) -> list[str]:
        return [override for change in self.changes for override in change.overrides]


def nearest_fit(plan: Plan, *, trains: bool = True, runnable: bool = False) -> Nearest | None:
    """The least harmful changes with which the plan fits; None if it fits already or nothing helps.

    `runnable` leaves out what can be planned but not run yet (built.py).
    """
    if runnable and trains and plan.model.shape.model_type not in TRAINED:
        return None
    here = _Search(plan=plan, trains=trains, runnable=runnable)
    if here.accepted([]) is not None:
        return None
    found = here.fitting(Harm.learning)
    if found:
        return found
    moves = [(change, there) for change in _moves(plan) if (there := tried(plan, [change], trains=trains)) is not None]
    searches = [(change, _Search(plan=there, trains=trains, runnable=runnable)) for change, there in moves]
    for worst in (Harm.none, Harm.learning):
        for moved, search in searches:
            there = Nearest(changes=[], plan=search.plan) if search.accepted([]) else search.fitting(worst)
            if there is not None:
                return Nearest(changes=[moved, *there.changes], plan=there.plan)
    return None


def larger_hardware(plan: Plan) -> list[tuple[str, HardwareConfig]]:
    """Machines of conf/hardware with more memory than this plan's, the smallest first."""
    have = (plan.memory or 0) * max(plan.config.hardware.gpus, 1) if plan.layout.on_gpu else 0
    return [(name, hw) for name, hw in gpu_machines() if whole_memory(hw) > have]


def changes(plan: Plan) -> Iterator[Change]:
    """Everything but the lengths that could make this plan smaller, the least harmful first."""
    yield from _smaller_batches(plan)
    yield from _layouts(plan)
    yield from _less_learning(plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """One machine's search; every combination is planned once."""

    plan: Plan
    trains: bool
    runnable: bool
    memo: dict[tuple[str, ...], Plan | None] = field(default_factory=dict)

    def fitting(self, worst: Harm) -> Nearest | None:
        """The least harmful changes that are enough, with no more harm than `worst`."""
        options = list(changes(self.plan))
        harmless = [option for option in options if option.harm is Harm.none]
        forced = self._positions()
        if forced:
            return self._within_positions(forced, worst) if worst else None
        found = self._first(harmless) or self._several(harmless)
        if found or worst is Harm.none:
            return found
        rest = [option for option in options if option not in harmless]
        return (
            self._shorter([], HALF)
            or self._shorter(harmless, LEAST)
            or self._first(rest)
            or self._several(options)
            or self._shorter(options, LEAST)
        )

    def planned(self, chosen: list[Change]) -> Plan | None:
        """The plan with these changes; None where they cannot be set together."""
        key = tuple(override for change in chosen for override in change.overrides)
        if key not in self.memo:
            self.memo[key] = tried(self.plan, chosen, trains=self.trains) if chosen else self.plan
        return self.memo[key]

    def accepted(self, chosen: list[Change]) -> Plan | None:
        """The plan with these changes if it fits, and can be run where that is asked for."""
        plan = self.planned(chosen)
        if plan is None or not plan.fits or (self.runnable and not_built(plan, trains=self.trains)):
            return None
        return plan

    def _first(self, options: list[Change]) -> Nearest | None:
        """The first that is enough alone."""
        for option in options:
            if (plan := self.accepted([option])) is not None:
                return Nearest(changes=[option], plan=plan)
        return None

    def _several(self, options: list[Change]) -> Nearest | None:
        """The first of them that are enough together, without those that are not needed."""
        chosen: list[Change] = []
        for option in options:
            if self._joins(chosen, option):
                chosen.append(option)
                if self.accepted(chosen) is not None:
                    break
        if self.accepted(chosen) is None:
            return None
        for option in list(reversed(chosen)):
            without = [one for one in chosen if one is not option]
            if without and self.accepted(without) is not None:
                chosen = without
        return Nearest(changes=chosen, plan=self.accepted(chosen))

    def _shorter(self, options: list[Change], part: int) -> Nearest | None:
        """The longest responses that fit with all of these, without those that gain next to nothing; None where less
        than one of `part` parts of the wanted length is left."""
        wanted = self.plan.lengths.response
        chosen: list[Change] = []
        for option in options:
            if "trainer.micro_batch_tokens" not in option.values and self._joins(chosen, option):
                chosen.append(option)
        if options and (smaller := self._smaller_cache()) and not any(change.cached for change in chosen):
            chosen.append(smaller)
        plan = self.planned(chosen)
        if self.runnable and plan is not None and not_built(plan, trains=self.trains):
            return None  # whatever the length
        tokens = self._longest(chosen, max(FEWEST, wanted // part), wanted - 1)
        if not tokens:
            return None
        for option in list(reversed(chosen)):
            without = [one for one in chosen if one is not option]
            if self.accepted([*without, self._cut(without, int(tokens * SPARE))]) is not None:
                chosen = without
        cut = self._cut(chosen, self._longest(chosen, int(tokens * SPARE), tokens))
        plan = self.accepted([*chosen, cut])
        return Nearest(changes=merged([*chosen, cut]), plan=plan) if plan is not None else None

    def _smaller_cache(self) -> Change | None:
        """A cache that is too small for what is wanted at once may yet be larger than shorter responses need."""
        pool, running = self.plan.config.engine.max_total_tokens, self.plan.lengths.running
        if pool is None:
            return None
        return Change(values={"engine.max_total_tokens": pool}, why="a cache for what is in flight", cached=running)

    def _longest(self, chosen: list[Change], least: int, most: int) -> int:
        plan = self.planned(chosen)
        if plan is None:
            return 0
        return longest_response(plan, trains=self.trains, least=least, most=most, cached=_cached(chosen))

    def _cut(self, chosen: list[Change], tokens: int) -> Change:
        """Responses of so many tokens, beside the chosen changes."""
        plan = self.planned(chosen) or self.plan
        values = response_values(plan, tokens, trains=self.trains, cached=_cached(chosen))
        why = "responses as long as fit" + " and a cache for them" * ("engine.max_total_tokens" in values)
        return Change(values=values, why=why, harm=Harm.lengths)

    def _within_positions(self, forced: Change, worst: Harm) -> Nearest | None:
        """The search with lengths that the model has positions for: caches are sized for these."""
        plan = self.planned([forced])
        if plan is None:
            return None
        there = _Search(plan=plan, trains=self.trains, runnable=self.runnable)
        found = Nearest(changes=[], plan=plan) if there.accepted([]) else there.fitting(worst)
        return Nearest(changes=merged([forced, *found.changes]), plan=found.plan) if found is not None else None

    def _positions(self) -> Change | None:
        """Lengths that the model has positions for; prompts are shortened only where they alone are too long."""
        positions, rollout, counted = self.plan.model.shape.longest, self.plan.config.rollout, self.plan.lengths
        if not positions or counted.longest <= positions:
            return None
        prompt, turns = rollout.max_prompt_tokens, self.plan.config.environment.max_turns
        values: dict[str, Any] = {}
        if prompt + turns > positions:
            values["rollout.max_prompt_tokens"] = prompt = positions // 2
        if prompt + turns > positions:  # one token a turn is too much
            values["environment.max_turns"] = turns = max((positions - prompt) // counted.response, 1)
        values[counted.response_key] = max((positions - prompt) // turns, 1)
        return Change(values=values, why="lengths that the model has positions for", harm=Harm.lengths)

    def _joins(self, chosen: list[Change], option: Change) -> bool:
        """Whether a change can be added: nothing is undone, nothing refuses it, nothing unbuilt comes in where that
        matters."""
        exclusive = {"memory.shared_base", "memory.offload", "memory.trainer_layout"}
        taken = {key for change in chosen for key in change.values}
        if taken & exclusive and exclusive & set(option.values):
            return False
        if self.planned([*chosen, option]) is None:
            return False
        return not (self.runnable and self._unbuilt(option))

    def _unbuilt(self, option: Change) -> bool:
        """Whether this change alone brings in something that cannot be run yet."""
        plan = self.planned([option])
        missing = not_built(self.plan, trains=self.trains)
        return plan is not None and len(not_built(plan, trains=self.trains)) > len(missing)


def _cached(chosen: list[Change]) -> int:
    """Sequences for which the chosen changes set the cache; 0 if none does."""
    return next((change.cached for change in reversed(chosen) if change.cached), 0)


def _moves(plan: Plan) -> Iterator[Change]:
    """Larger machines. What the config sets of its hardware by hand stays when another is named, so it is set again."""
    config, own = plan.config, plan.config.hardware
    file = machine_of(own.name)
    for name, hardware in larger_hardware(plan):
        values: dict[str, Any] = {"hardware": name}
        for key in ("device", "gpus", "memory_mib", "host_memory_mib"):
            by_hand = file is None or getattr(own, key) != getattr(file, key)
            if by_hand and getattr(own, key) != getattr(hardware, key):
                values[f"hardware.{key}"] = getattr(hardware, key)
        implied: dict[str, Any] = {}
        spans = config.engine.tensor_parallel == own.gpus  # models made for whole machines have ${hardware.gpus}
        if spans and own.gpus != hardware.gpus:
            (values if own.gpus else implied)["engine.tensor_parallel"] = hardware.gpus  # nobody writes 0 by hand
        why = f"{hardware.gpus} GPU{'s' * (hardware.gpus > 1)} of {size(whole_memory(hardware) / hardware.gpus)}"
        yield Change(values=values, why=why, implied=implied)


def _smaller_batches(plan: Plan) -> Iterator[Change]:
    """Less at a time, which changes how fast it goes and nothing else."""
    config, counted = plan.config, plan.lengths
    on_gpu, pool = config.hardware.device is Device.cuda, config.engine.max_total_tokens
    pool = CPU_TOKENS if pool is None and not on_gpu else pool
    answer, running = counted.response * config.environment.max_turns, counted.running
    needed = pages(held_at_once(config, running, answer))
    if pool is not None and pool < counted.longest:
        why = "a cache that holds a whole sequence"
        yield Change(values={"engine.max_total_tokens": needed}, why=why, cached=running)
    elif pool is None or pool > needed:
        why = "a cache for what is in flight and no more"
        yield Change(values={"engine.max_total_tokens": needed}, why=why, cached=running)
    if not config.trainer.activation_checkpointing:
        yield Change(values={"trainer.activation_checkpointing": True}, why="recompute activations")
    if config.trainer.micro_batch_tokens > counted.longest:
        yield Change(values={"trainer.micro_batch_tokens": counted.longest}, why="one sequence per micro-batch")
    if config.trainer.logprob_chunk_tokens > SHORT_CHUNK:
        yield Change(values={"trainer.logprob_chunk_tokens": SHORT_CHUNK}, why="fewer logits at a time")
    if config.engine.mem_fraction_static < 0.9:
        yield Change(values={"engine.mem_fraction_static": 0.9}, why="let the engine reserve more of the GPU")
    for power in reversed(range((counted.running - 1).bit_length())):  # the largest that is enough is the nearest
        running = 1 << power
        if (pool or counted.in_flight) > running * counted.longest:
            fewer = {"engine.max_running_requests": running}
            fewer["engine.max_total_tokens"] = pages(held_at_once(config, running, answer))
            why = f"{running} sequence{'s' * (running > 1)} at once instead of {counted.running}, so sampling is slower"
            yield Change(values=fewer, why=why, cached=running)
    if config.engine.live_versions > 2:
        yield Change(values={"engine.live_versions": 2}, why="fewer adapter slots")
    if on_gpu and 1 <= config.engine.tensor_parallel < config.hardware.gpus:
        yield Change(values={"engine.tensor_parallel": config.hardware.gpus}, why="the engine on all GPUs")


def _less_learning(plan: Plan) -> Iterator[Change]:
    """Another base, or a smaller adapter: what is learned changes."""
    adapter, harm = plan.config.adapter, Harm.learning
    if adapter.kind is AdapterKind.oft and adapter.block_size > SMALL_BLOCK:
        yield Change(values={"adapter.block_size": SMALL_BLOCK}, why="a smaller adapter", harm=harm)
    if adapter.kind is AdapterKind.lora and adapter.rank > SMALL_RANK:
        yield Change(values={"adapter.rank": SMALL_RANK}, why="a smaller adapter", harm=harm)
    own = adapter.kind is AdapterKind.oft and adapter.expert_width is ExpertWidth.per_expert
    if own and adapter.expert_targets:
        values = (
            {"adapter.expert_targets": ["gate_proj", "up_proj"]} if set(adapter.expert_targets) != SHAREABLE else {}
        )
        values["adapter.expert_width"] = ExpertWidth.shared
        yield Change(values=values, why="one rotation for all routed experts of a layer", harm=harm)
    if set(plan.model.rules.formats.values()) <= {"", "fp8"}:
        yield Change(values={"quantization": "int4"}, why="a 4-bit base", harm=harm)
    if adapter.expert_targets and adapter.targets:
        values = {} if own or adapter.kind is AdapterKind.lora else {"adapter.expert_width": ExpertWidth.per_expert}
        values["adapter.expert_targets"] = []
        yield Change(values=values, why="no adapters on routed experts", harm=harm)


def _layouts(plan: Plan) -> Iterator[Change]:
    memory, shape, gpus = plan.config.memory, plan.model.shape, max(plan.config.hardware.gpus, 1)
    away = {"memory.offload": Offload.none} if plan.host.limit else {}
    split = TrainerLayout.expert_parallel if shape.experts and shape.experts % gpus == 0 else TrainerLayout.sharded
    if memory.colocated and not memory.shared_base and (memory.offload is Offload.none or away):
        values: dict[str, Any] = {"memory.shared_base": True, **away}
        if memory.engine_layout is not EngineLayout.auto:
            values["memory.engine_layout"] = EngineLayout.auto
        if plan.config.engine.tensor_parallel != gpus:
            values["engine.tensor_parallel"] = gpus
        if memory.trainer_layout is TrainerLayout.sharded:
            values["memory.trainer_layout"] = TrainerLayout.auto
        yield Change(values=values, why="one copy of the base")
    if away:
        yield Change(values=away, why="nothing waits in the machine's own memory")
    if gpus > 1 and plan.layout.trainer is TrainerLayout.replicated:
        yield Change(values={"memory.trainer_layout": split}, why="a trainer that splits its base")
    elif gpus > 1 and plan.layout.trainer is TrainerLayout.expert_parallel and not memory.shared_base:
        yield Change(values={"memory.trainer_layout": TrainerLayout.sharded}, why="a trainer that splits everything")
    if memory.colocated and memory.offload is Offload.none and not memory.shared_base and plan.layout.on_gpu:
        yield Change(values={"memory.offload": Offload.swap}, why="the copy that is not at work waits in host memory")
