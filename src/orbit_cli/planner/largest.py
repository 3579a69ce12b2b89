"""How far a config could go: the longest responses, the largest micro-batches, the most sequences in the cache.

A plan counts the micro-batch with the most tokens among all lengths up to the limits, so memory never falls with the
length. Micro-batches of one sequence take the least; where the longest response needs them, the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orbit_cli.planner.changes import Change, tried
from orbit_cli.planner.lengths import held_at_once, one_sequence
from orbit_cli.planner.part import Part, Side
from orbit_cli.planner.plan import CACHED, WORK, Plan
from orbit_cli.planner.words import shown

PAGE = 4096  # caches are suggested in multiples of this many tokens
UNBOUNDED = 1 << 20  # tokens of a sequence, where the model does not say how many it takes


def longest_response(
    plan: Plan, *, trains: bool = True, least: int = 1, most: int | None = None, cached: int = 0
) -> int:
    """Largest rollout.max_new_tokens (an evaluation's own length where that counts) of `least` to `most` that fits, set
    as `response_values` says; 0 if none does.

    All else is equal but trainer.micro_batch_tokens, which may shrink to one sequence, and, with `cached`,
    engine.max_total_tokens, which then holds so many sequences. Never less than what the plan has if that fits, never
    more than the model's positions.
    """
    config = plan.config
    room = (plan.model.shape.longest or UNBOUNDED) - config.rollout.max_prompt_tokens

    def fits(tokens: int) -> bool:
        return _fits(plan, _alone(plan, tokens, cached), trains)

    now, room = plan.lengths.response, max(room // config.environment.max_turns, 0)
    most = room if most is None else min(most, room)
    if plan.fits and least <= now <= most:
        return _largest(fits, now, most)
    return _largest(fits, least, most) if least <= most and fits(least) else 0


def response_values(plan: Plan, tokens: int, *, trains: bool = True, cached: int = 0) -> dict[str, Any]:
    """What to set for responses of so many tokens: the micro-batch too where it must be smaller than it is, and the
    cache where it is to hold `cached` sequences."""
    config, values = plan.config, {plan.lengths.response_key: tokens} | _cache(plan, tokens, cached)
    whole = config.rollout.max_prompt_tokens + tokens * config.environment.max_turns
    choices = [values]
    if whole < config.trainer.micro_batch_tokens:
        choices.append(values | {"trainer.micro_batch_tokens": whole})  # a rounder number, which mostly is enough
    return next((one for one in choices if _fits(plan, one, trains)), _alone(plan, tokens, cached))


def longest_words(plan: Plan, *, trains: bool = True) -> str:
    """The longest response in a sentence."""
    tokens = longest_response(plan, trains=trains)
    micro = response_values(plan, tokens, trains=trains).get("trainer.micro_batch_tokens")
    shrunk = f" with trainer.micro_batch_tokens={micro}" if micro else ""
    end = longest_limit(plan, tokens, trains=trains)
    return f"responses of {tokens:,} tokens fit ({plan.lengths.response_key}={tokens}{shrunk}), {end}"


def longest_limit(plan: Plan, tokens: int, *, trains: bool = True) -> str:
    """What keeps responses from being longer than these, the longest that fit: "up to ..." or "as much as ..."."""
    config, positions, (room, has_room) = plan.config, plan.model.shape.longest, plan.cache_room
    longer = config.rollout.max_prompt_tokens + (tokens + 1) * config.environment.max_turns
    if longer > (positions or UNBOUNDED):
        untold = f"the {UNBOUNDED:,} tokens of a sequence that were tried: the model does not say its positions"
        return f"up to the model's {positions:,} positions" if positions else f"up to {untold}"
    if room is not None and longer > room:
        return f"up to sequences of {room:,} tokens: {has_room} for no more"
    then = tried(plan, [Change(values=_alone(plan, tokens + 1), why="")], trains=trains)
    if then is None or then.fits:  # another length, of the evaluation or of a penalty, is in the way
        return "as much as the other lengths of this config let it"
    full = [phase.name for phase in then.phases if then.budget is not None and phase.nbytes > then.budget]
    where = "the memory of each GPU" if plan.layout.on_gpu else "this machine's memory"
    if not full:
        return f"as much as the engine's share takes (engine.mem_fraction_static={config.engine.mem_fraction_static:g})"
    half = tried(plan, [Change(values=_alone(plan, max(tokens // 2, 1)), why="")], trains=trains) or plan
    part = _grown(half, then, full[0])
    return f"as much as {where} takes in {WORK[full[0]]}; what grows most is the {part.side}'s {shown(part.name)}"


def _grown(before: Plan, after: Plan, name: str) -> Part:
    """The part of a phase that grew most; of what another phase left behind, the part of that phase."""
    old, new = (next(phase for phase in plan.phases if phase.name == name) for plan in (before, after))
    had = {part.key: part.nbytes for part in old.parts}
    part = max(new.parts, key=lambda part: part.nbytes - had.get(part.key, 0))
    own = "train" if part.side is Side.trainer else "rollout"
    return _grown(before, after, own) if part.name.startswith(CACHED) and own != name else part


def largest_micro_batch(plan: Plan) -> int:
    """Largest trainer.micro_batch_tokens that fits, up to all that a trainer process gets of a step; 0 if none does."""
    whole = whole_step(plan)

    def fits(tokens: int) -> bool:
        return _fits(plan, {"trainer.micro_batch_tokens": tokens}, True)

    return _largest(fits, min(plan.config.trainer.micro_batch_tokens, whole) if plan.fits else 0, whole)


def whole_step(plan: Plan) -> int:
    """Tokens of the micro-batch that takes all of a step; more changes nothing."""
    return plan.lengths.share * plan.lengths.longest


def micro_batch_words(plan: Plan) -> str:
    """The largest micro-batch in a sentence: what to set, or why there is nothing to gain."""
    key, counted = "trainer.micro_batch_tokens", plan.lengths
    tokens, now = largest_micro_batch(plan), plan.config.trainer.micro_batch_tokens
    samples = max(tokens // counted.longest, 1)
    if now >= whole_step(plan):
        return f"micro-batches: one takes all of a step already, so a larger {key} than {now} changes nothing"
    if tokens >= whole_step(plan):
        return f"micro-batches: one of {tokens:,} padded tokens ({key}={tokens}) takes all of a step and fits"
    if samples == 1:
        return f"micro-batches hold one sequence of full length: two do not fit, so keep {key} at or below {tokens}"
    holds = f"{samples:,} sequences of full length"
    return f"micro-batches of {tokens:,} padded tokens fit ({key}={tokens}, now {now}): {holds}"


def sequences_at_once(plan: Plan) -> int:
    """Sequences of full length that the cache of one GPU would hold if it took what is left; 0 if nothing is."""
    if plan.budget is None or not plan.cache_bytes_per_token:
        return 0
    phase = next(phase for phase in plan.phases if phase.name == "rollout")
    kept = sum(part.nbytes for part in phase.parts if part.name != "KV cache")
    return max(int((plan.budget - kept) / plan.cache_bytes_per_token) // plan.lengths.longest, 0)


def pages(tokens: int) -> int:
    """A cache of so many tokens, rounded up as it is suggested."""
    return -(-tokens // PAGE) * PAGE


def _cache(plan: Plan, tokens: int, cached: int) -> dict[str, Any]:
    """A cache for so many sequences with responses of so many tokens; nothing for none."""
    turns = plan.config.environment.max_turns
    return {"engine.max_total_tokens": pages(held_at_once(plan.config, cached, tokens * turns))} if cached else {}


def _alone(plan: Plan, tokens: int, cached: int = 0) -> dict[str, Any]:
    """Responses of so many tokens in micro-batches that take no second one."""
    config, values = plan.config, {plan.lengths.response_key: tokens} | _cache(plan, tokens, cached)
    alone = one_sequence(config.rollout.max_prompt_tokens, tokens * config.environment.max_turns)
    if alone < config.trainer.micro_batch_tokens:
        values["trainer.micro_batch_tokens"] = alone
    return values


def _fits(plan: Plan, values: dict[str, Any], trains: bool) -> bool:
    then = tried(plan, [Change(values=values, why="")], trains=trains)
    return then is not None and then.fits


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Largest value from `least`, which is known to fit, to `most`; more never needs less."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
