"""The questions people come with, answered: does it fit, what limits, what to change; and how fast the answer comes."""

from __future__ import annotations

import time

import pytest
from planning import bases, composed, planned

from orbit_cli.errors import ConfigError
from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.built import not_built
from orbit_cli.planner.largest import longest_response
from orbit_cli.planner.model import read_model
from orbit_cli.planner.part import Side
from orbit_cli.planner.plan import make_plan
from orbit_cli.planner.view import to_json

SHARED = "memory.shared_base=true"


def test_kimi_on_eight_b200_fits_with_two_copies_and_with_one() -> None:
    two, one = planned("model=kimi_k26", "hardware=b200x8"), planned("model=kimi_k26", "hardware=b200x8", SHARED)
    assert two.fits and one.fits
    assert two.budget - two.peak.nbytes < 10e9  # barely
    assert one.budget - one.peak.nbytes > 60e9
    assert longest_response(one) > 10 * longest_response(two)


def test_kimi_on_eight_h200_fits_with_one_copy_only() -> None:
    two, one = planned("model=kimi_k26", "hardware=h200x8"), planned("model=kimi_k26", "hardware=h200x8", SHARED)
    assert not two.fits and one.fits
    assert "two copies of the base alone take 170.1 GB" in two.limits[0]
    assert nearest_fit(two).overrides == [SHARED]


def test_v4_pro_on_eight_b200_two_copies_cannot_be_together() -> None:
    plan = planned("model=deepseek_v4_pro", "hardware=b200x8")
    assert not plan.fits
    assert "the two copies of the base alone take 237.8 GB" in plan.limits[0]
    both = bases(plan.phases[0], Side.trainer) + bases(plan.phases[0], Side.engine)
    assert both * 1e9 > plan.memory
    assert nearest_fit(plan).overrides == ["memory.offload=swap"]
    assert planned("model=deepseek_v4_pro", "hardware=b200x8", SHARED, "engine.mem_fraction_static=0.9").fits


def test_v4_flash_on_one_b200_needs_one_copy() -> None:
    plan = planned("model=deepseek_v4_flash", "hardware=b200x1")
    assert not plan.fits
    assert nearest_fit(plan).overrides == ["engine.mem_fraction_static=0.9", SHARED]
    assert planned("model=deepseek_v4_flash", "hardware=b200x1", SHARED, "engine.mem_fraction_static=0.9").fits


def test_qwen3_moe_in_int4_on_one_card_of_24_gb() -> None:
    plan = planned("model=qwen3_30b_a3b", "hardware=rtx4090x1")
    assert not plan.fits
    overrides = nearest_fit(plan).overrides
    assert SHARED in overrides and "trainer.activation_checkpointing=true" in overrides
    assert planned("model=qwen3_30b_a3b", "hardware=rtx4090x1", *overrides).fits
    today = nearest_fit(plan, runnable=True)
    assert not not_built(today.plan)
    assert any(text.startswith("hardware=") for text in today.overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=kimi_k26", "hardware=b200x8", "rollout.max_new_tokens=300000"), "positions"),
        (("model=qwen3_4b", "hardware=h200x1", "engine.max_total_tokens=64"), "holds no whole sequence"),
        (("model=qwen3_4b", "hardware=rtx4090x1", "engine.mem_fraction_static=0.1"), "engine.mem_fraction_static=0.1"),
    ],
)
def test_other_limits_have_their_sentence(overrides: tuple[str, ...], words: str) -> None:
    assert any(words in limit for limit in planned(*overrides).limits)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=qwen3_4b", "hardware=h200x1", "engine.tensor_parallel=8"), "more than hardware=h200x1 has"),
        (("model=smollm2_135m", "hardware=h200x8", "engine.tensor_parallel=8"), "does not divide the 9 attention"),
        (("model=qwen3_4b", "hardware=h200x8", "memory.trainer_layout=expert_parallel"), "no routed experts"),
        (("model=kimi_k26", "hardware=b200x8", "memory.colocated=false"), "leaves none to the trainer"),
        (("model=kimi_k26", "hardware=b200x8", SHARED, "memory.trainer_layout=sharded"), "needs one layout"),
        (("model=kimi_k26", SHARED, "memory.engine_layout=tensor_parallel"), "memory.engine_layout=expert_parallel"),
        (("model=kimi_k26", SHARED, "memory.offload=swap"), "keep one of the two"),
        (("model=kimi_k26", SHARED, "memory.colocated=false"), "memory.colocated=true"),
        (("memory.headroom=0.9",), "0.02"),
        (("model=checkpoint",), "model.path"),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        planned(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=kimi_k26", "hardware=h200x8"),
        ("model=deepseek_v4_pro", "hardware=b200x8"),
        ("model=deepseek_v4_pro", "hardware=rtx4090x1", "adapter.expert_targets=[gate_proj,up_proj,down_proj]"),
    ],
)
def test_any_plan_takes_less_than_three_tenths_of_a_second(overrides: tuple[str, ...]) -> None:
    """Processor time of everything after composing: facts, plan, advice, longest and largest."""
    config = composed(*overrides)
    started = time.process_time()
    to_json(make_plan(config, model=read_model(config)))
    assert time.process_time() - started < 0.3
