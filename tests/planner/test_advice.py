"""What is advised: it fits when it is pasted, none of it is idle, and the least harmful comes first."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import pytest
import yaml
from planning import composed, planned

from orbit_cli.config.locate import group_options
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.memory import TrainerLayout
from orbit_cli.errors import ConfigError
from orbit_cli.planner.advice import Nearest, nearest_fit
from orbit_cli.planner.built import not_built
from orbit_cli.planner.machine import gpu_machines
from orbit_cli.planner.plan import Plan, make_plan

LONG = ("experiment=long_answers",)
KIMI = ("model=kimi_k26", "hardware=h200x8", "memory.shared_base=true", *LONG)
RUNNING, POOL, TOKENS = "engine.max_running_requests", "engine.max_total_tokens", "rollout.max_new_tokens"
CASES = [
    ("model=kimi_k26", "hardware=h100x8"),
    ("model=kimi_k26", "hardware=b200x8", *LONG),
    ("model=deepseek_v4_pro", "hardware=h200x8"),
    ("model=deepseek_v4_flash", "hardware=cpu"),
    ("model=qwen3_30b_a3b", "hardware=rtx4090x1", "quantization=bf16"),
    ("model=kimi_k26", "hardware=b200x8", "adapter.expert_targets=[gate_proj,up_proj,down_proj]"),
    ("model=kimi_k26", "hardware=h200x8", "hardware.gpus=4"),
    ("model=qwen3_4b", "hardware=h200x1", "hardware.memory_mib=3000"),
    ("model=kimi_k26", "hardware=h200x8", "hardware.gpus=1", "hardware.memory_mib=20000", *LONG),
    (*KIMI, "rollout.max_new_tokens=30000"),
]


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_what_is_advised_fits_and_nothing_of_it_is_idle(overrides: tuple[str, ...]) -> None:
    """Pasted behind what was asked: a group in place of the same group, all that was set by hand stays."""
    plan = planned(*overrides)
    assert not plan.fits
    nearest = nearest_fit(plan)
    assert nearest is not None and nearest.plan.fits
    groups = [text for text in nearest.overrides if "." not in text.partition("=")[0]]
    kept = [text for text in overrides if not any(text.startswith(g.partition("=")[0] + "=") for g in groups)]
    assert planned(*kept, *nearest.overrides).fits
    for idle in nearest.overrides:
        if groups and idle.startswith(("hardware", "engine.tensor_parallel")):
            continue  # says which machine it is, though what was set by hand may be enough
        rest = [text for text in nearest.overrides if text != idle]
        try:
            assert not planned(*(kept if idle not in groups else overrides), *rest).fits, idle
        except ConfigError:
            continue  # the rest alone is refused


def test_what_changes_nothing_comes_first_then_lengths_then_learning() -> None:
    assert nearest_fit(planned("model=kimi_k26", "hardware=b200x8", *LONG)).overrides == ["memory.shared_base=true"]
    fewer = nearest_fit(planned(*KIMI, "rollout.max_new_tokens=25765")).overrides  # slower, and the same is sampled
    assert fewer == ["trainer.micro_batch_tokens=27813", f"{RUNNING}=2", f"{POOL}=57344"]
    for wanted in (30_000, 40_000):  # the longest, not a power of two, and no smaller adapter
        overrides = nearest_fit(planned(*KIMI, f"rollout.max_new_tokens={wanted}")).overrides
        assert overrides == ["rollout.max_new_tokens=23691", "trainer.micro_batch_tokens=25739"]
    assert not planned(*KIMI, "rollout.max_new_tokens=23692", "trainer.micro_batch_tokens=25740").fits


@pytest.mark.parametrize(
    ("overrides", "running"),
    [
        (("model=qwen3_30b_a3b", "hardware=h200x1"), 32),
        (("model=qwen3_4b", "hardware=rtx4090x1"), 2),
        (("model=qwen3_30b_a3b", "hardware=h200x1", f"{RUNNING}=100"), 32),
    ],
)
def test_as_many_sequences_at_once_as_fit(overrides: tuple[str, ...], running: int) -> None:
    """Of the powers of two below what is set, the largest; twice as many do not fit."""
    advised = nearest_fit(planned(*overrides, *LONG)).overrides
    assert f"{RUNNING}={running}" in advised
    rest = [text for text in advised if not text.startswith((RUNNING, POOL))]
    twice = (f"{RUNNING}={2 * running}", f"{POOL}={2 * running * (2048 + 20_480)}")
    assert planned(*overrides, *LONG, *advised).fits
    assert not planned(*overrides, *LONG, *rest, *twice).fits


def test_the_cache_follows_the_shorter_responses() -> None:
    """A cache for the wanted length would leave less for them."""
    small = ("model=llama32_1b", "hardware=rtx4090x1", "hardware.memory_mib=8000", *LONG)
    advised = nearest_fit(planned(*small), runnable=True).overrides
    set_to = {key: int(value) for key, value in (text.split("=") for text in advised if text[-1].isdigit())}
    tokens, running, pool = (set_to[key] for key in (TOKENS, RUNNING, POOL))
    assert pool == -(-running * (2048 + tokens) // 4096) * 4096 < running * (2048 + 20_480)
    assert len([text for text in advised if text.startswith(POOL)]) == 1
    assert planned(*small, *advised).fits
    assert not planned(*small, *advised, f"{POOL}={running * (2048 + 20_480)}").fits


def test_lengths_beyond_the_positions_do_not_size_the_cache() -> None:
    """With 50,000 tokens wanted and 38,912 possible, as many sequences as fit at 38,912."""
    long = ("model=qwen3_4b", "hardware=h200x1", *LONG)
    advised = nearest_fit(planned(*long, f"{TOKENS}=50000")).overrides
    assert advised == [f"{TOKENS}=38912", f"{RUNNING}=16", f"{POOL}=655360"]
    assert planned(*long, *advised).fits


def test_short_responses_are_not_cut() -> None:
    plan = planned("model=kimi_k26", "hardware=b200x8", "adapter.expert_targets=[gate_proj,up_proj,down_proj]")
    assert not any("max_new_tokens" in text for text in nearest_fit(plan).overrides)


MODELS = [name for name in group_options("model") if name != "checkpoint"]
MACHINES = {name: hardware for name, hardware in gpu_machines()}
VARIANTS = [
    {},
    {"adapter.expert_targets": ["gate_proj", "up_proj", "down_proj"]},
    {"rollout.max_new_tokens": 20_480, "rollout.max_prompt_tokens": 2048, "trainer.micro_batch_tokens": 32_768},
    {"memory.trainer_layout": TrainerLayout.sharded, "engine.tensor_parallel": 1},
    {"hardware.memory_mib": 30_000},
    {"hardware.gpus": 2, "engine.tensor_parallel": 1},
]


@pytest.mark.parametrize("name", MODELS)
def test_every_suggestion_fits_when_it_is_set(name: str) -> None:
    """All models on all machines: what is advised fits, and what is advised for today can be run today."""
    for machine, hardware in MACHINES.items():
        for variant in VARIANTS:
            ranks = hardware.gpus if composed(f"model={name}", "hardware=h200x8").engine.tensor_parallel == 8 else 1
            asked = {"hardware": machine, "engine.tensor_parallel": ranks, **variant}
            config = changed(composed(f"model={name}"), asked)
            try:
                plan = make_plan(config)
            except ConfigError:
                assert "adapter.expert_targets" in variant, (machine, variant)  # a dense model has none
                continue
            for runnable in (False, True):
                nearest = nearest_fit(plan, runnable=runnable)
                if nearest is None:
                    continue
                then = pasted(plan, nearest, variant)
                assert then.fits, (machine, variant, nearest.overrides, then.limits)
                assert not (runnable and not_built(then)), (machine, variant, nearest.overrides)
            assert plan.fits or nearest_fit(plan) is not None, (machine, variant, plan.limits)


def pasted(plan: Plan, nearest: Nearest, by_hand: dict[str, object]) -> Plan:
    """The plan with the suggestion behind what was set by hand, which another hardware= does not undo."""
    values = {key: yaml.safe_load(text) for key, text in (one.split("=", 1) for one in nearest.overrides)}
    kept = {key: value for key, value in by_hand.items() if key.startswith("hardware.")}
    first = {key: value for key, value in values.items() if key == "hardware"}
    return make_plan(changed(plan.config, {**first, **(kept if first else {}), **values}))


def changed(config: OrbitConfig, values: dict[str, object]) -> OrbitConfig:
    """The config with overrides set, without Hydra; a model made for a whole machine goes along with it."""
    for key, value in values.items():
        if key == "hardware":
            whole = config.engine.tensor_parallel == config.hardware.gpus > 1
            config = replace(config, hardware=MACHINES[value])
            if whole:
                config = changed(config, {"engine.tensor_parallel": config.hardware.gpus})
            continue
        section, field = key.split(".") if "." in key else (key, "format")
        part = getattr(config, section)
        kind = type(getattr(part, field))
        value = kind(value) if issubclass(kind, StrEnum) else value
        config = replace(config, **{section: replace(part, **{field: value})})
    return config


def test_more_turns_than_positions_end_in_advice() -> None:
    """A response of one token in each turn is too long already: turns are what must be fewer."""
    turns = "environment.max_turns=1000"
    plan = planned("recipe=smoke_dense_oft", turns, "model.architecture.max_position_embeddings=600")
    nearest = nearest_fit(plan)
    assert nearest is not None and nearest.plan.fits
    assert any(text.startswith("environment.max_turns=") for text in nearest.overrides)
