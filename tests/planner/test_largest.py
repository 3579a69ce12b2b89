"""The longest responses and the largest micro-batches, against sweeps over what could be set."""

from __future__ import annotations

import pytest
from planning import planned

from orbit_cli.planner.changes import Change, tried
from orbit_cli.planner.largest import (
    largest_micro_batch,
    longest_response,
    longest_words,
    micro_batch_words,
    response_values,
    sequences_at_once,
)
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


def test_memory_falls_and_rises_with_the_length_and_the_answer_is_the_last_that_fits() -> None:
    plan = planned(*KIMI, LONG)
    found = [fits(plan, max_new_tokens=tokens) for tokens in (391, 2048, 16_384, 23_844, 23_845)]
    assert found == [True, False, True, True, False]
    assert "responses of 23,844 tokens fit (rollout.max_new_tokens=23844)" in longest_words(plan)


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
