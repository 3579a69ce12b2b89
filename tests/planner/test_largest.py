"""The longest responses and the largest micro-batches, against sweeps over what could be set."""

from __future__ import annotations

import re

import pytest
from planning import planned

from orbit_cli.planner.changes import Change, tried
from orbit_cli.planner.largest import (
    largest_micro_batch,
    longest_limit,
    longest_response,
    longest_words,
    micro_batch_words,
    response_values,
    sequences_at_once,
)
from orbit_cli.planner.part import sizes_apart
from orbit_cli.planner.plan import Plan

KIMI = ("model=kimi_k26", "hardware=h200x8", "memory.shared_base=true")
LONG = "experiment=long_answers"
BASES = [
    KIMI,
    (*KIMI, LONG),
    ("model=kimi_k26", "hardware=b200x8"),
    ("model=deepseek_v4_pro", "hardware=b200x8", "memory.shared_base=true", "engine.mem_fraction_static=0.9"),
    ("model=qwen3_4b", "hardware=rtx4090x1", "quantization=int4", "engine.max_total_tokens=40960"),
    ("model=smollm2_360m", "hardware=rtx4090x1", "rollout.group_size=2", "rollout.max_prompt_tokens=1500"),
    ("model=smollm2_135m", "hardware=cpu", "environment=guess_number", "hardware.memory_mib=9000"),
]


def fits(plan: Plan, **values: int) -> bool:
    sections = {"micro_batch_tokens": "trainer", "max_new_tokens": "rollout"}
    change = Change(values={f"{sections[key]}.{key}": value for key, value in values.items()}, why="")
    then = tried(plan, [change])
    return then is not None and then.fits


@pytest.mark.parametrize("base", BASES, ids=" ".join)
def test_no_longer_response_fits(base: tuple[str, ...]) -> None:
    """With the micro-batch as it is or of one sequence; and what is said fits when it is pasted."""
    plan = planned(*base)
    turns, prompt = plan.config.environment.max_turns, plan.config.rollout.max_prompt_tokens
    most = longest_response(plan)
    assert most >= (plan.config.rollout.max_new_tokens if plan.fits else 1)
    assert planned(*base, *Change(values=response_values(plan, most), why="").overrides).fits
    longest = (plan.model.shape.longest - prompt) // turns
    step = max((longest - most) // 150, 1)
    for tokens in [*range(most + 1, min(most + 20, longest)), *range(most + 1, longest + 1, step)]:
        assert not fits(plan, max_new_tokens=tokens), tokens
        assert not fits(plan, max_new_tokens=tokens, micro_batch_tokens=prompt + tokens * turns), tokens
        assert not fits(plan, max_new_tokens=tokens, micro_batch_tokens=1), tokens


def test_memory_never_falls_with_the_length_since_shorter_responses_may_share_a_micro_batch() -> None:
    """A run with a limit of 20,480 tokens may sample 8 responses of 2,048, which compute more than one long one."""
    lengths = (1, 100, 391, 392, 2048, 8192, 16_384, 20_480, 23_844, 30_000)
    for base in (KIMI, ("model=qwen3_4b", "hardware=rtx4090x1")):
        needed = [planned(*base, LONG, f"rollout.max_new_tokens={n}").phases[0].nbytes for n in lengths]
        assert needed == sorted(needed)


def test_the_longest_response_is_the_last_that_fits() -> None:
    plan = planned(*KIMI, LONG)
    assert not plan.fits
    said = "responses of 23,691 tokens fit (rollout.max_new_tokens=23691 with trainer.micro_batch_tokens=25739)"
    assert said in longest_words(plan)
    assert fits(plan, max_new_tokens=23_691, micro_batch_tokens=25_739)
    assert not fits(plan, max_new_tokens=23_692, micro_batch_tokens=1)


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        (("model=tiny_dense", "hardware=h200x1"), "up to the model's 2,048 positions"),
        (("model=qwen3_4b", "hardware=h200x1", "engine.max_total_tokens=600"), "max_total_tokens has room for no"),
        (("model=qwen3_4b", "hardware=h200x1"), "memory of each GPU takes in training; .* the trainer's activations"),
        (("model=deepseek_v4_flash", "hardware=h200x8"), "memory of each GPU .* the trainer's attention scores"),
        (("model=smollm2_360m", "hardware.memory_mib=24000"), "this machine's memory .* the trainer's activations"),
        (("model=qwen3_30b_a3b", "hardware=h200x1", "engine.mem_fraction_static=0.3"), "share takes .*=0.3"),
    ],
)
def test_what_limits_the_longest_response_is_named(overrides: tuple[str, ...], limit: str) -> None:
    plan = planned(*overrides)
    words = longest_words(plan)
    assert re.search(limit, words), words
    assert words.endswith(longest_limit(plan, longest_response(plan)))


def test_a_cpus_own_cache_limits_too() -> None:
    """engine.max_total_tokens is 65,536 there unless it is set."""
    sampled = planned("model=llama32_1b", trains=False)
    assert longest_response(sampled, trains=False) == 65_536 - 128
    assert "a CPU's cache has room for no more" in longest_words(sampled, trains=False)
    too_long = planned("model=llama32_1b", "rollout.max_new_tokens=65409", trains=False)
    assert any("the cache holds no whole sequence of 65,537 tokens" in limit for limit in too_long.limits)


def test_a_smaller_micro_batch_is_said() -> None:
    plan = planned("model=kimi_k26", "hardware=b200x8")
    tokens = longest_response(plan)
    values = response_values(plan, tokens)
    assert values == {"rollout.max_new_tokens": tokens, "trainer.micro_batch_tokens": 128 + tokens}
    assert f"rollout.max_new_tokens={tokens} with trainer.micro_batch_tokens={128 + tokens}" in longest_words(plan)


def test_the_largest_micro_batch_is_the_largest() -> None:
    base = ("model=qwen3_30b_a3b", "hardware=h200x1", LONG, "engine.max_total_tokens=65536")
    plan = planned(*base)
    most = largest_micro_batch(plan)
    assert plan.config.trainer.micro_batch_tokens < most < plan.lengths.share * plan.lengths.longest
    assert planned(*base, f"trainer.micro_batch_tokens={most}").fits
    assert not planned(*base, f"trainer.micro_batch_tokens={most + plan.lengths.longest}").fits
    assert f"trainer.micro_batch_tokens={most}" in micro_batch_words(plan)
    assert sequences_at_once(plan) >= 1


def test_a_micro_batch_is_at_most_a_step() -> None:
    small = ("model=tiny_dense", "hardware=h200x1")
    step = planned(*small).lengths.share * planned(*small).lengths.longest
    assert f"trainer.micro_batch_tokens={step}) takes all of a step" in micro_batch_words(planned(*small))
    whole = planned(*small, f"trainer.micro_batch_tokens={step}")
    assert "takes all of a step already" in micro_batch_words(whole)


def test_where_two_sequences_do_not_fit_it_says_so() -> None:
    plan = planned(*KIMI, LONG, "rollout.max_new_tokens=23844")
    assert "two do not fit" in micro_batch_words(plan)


def test_sizes_that_look_the_same_get_more_digits() -> None:
    assert sizes_apart(188_400_473_000, 188_400_000_000) == ("188.4005 GB", "188.4000 GB")
    assert sizes_apart(2e9, 1e9) == ("2.0 GB", "1.0 GB")
