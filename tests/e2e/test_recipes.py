"""Recipes finish inside their gap, and a real model learns."""

import pytest

from orbit_cli.telemetry.names import unknown

GAP = 0.01


@pytest.mark.parametrize("recipe", ["smoke_dense_oft", "smoke_moe_lora", "smoke_mla_moe"])
def test_smoke_recipes_train_within_the_gap(orbit, recipe):
    orbit.run("train", f"recipe={recipe}", "run.name=smoke")
    rows = orbit.rows("smoke")
    assert len(rows) == 3
    assert all(row["logprob_gap_mean"] < GAP for row in rows if row["trained_tokens"])
    assert sum(row["trained_tokens"] for row in rows) > 0
    assert all(row["probe_gap_mean"] < GAP for row in rows)
    assert max(row["probe_moved_engine"] for row in rows) > 0
    assert unknown([*rows, *orbit.rows("smoke", "eval"), *orbit.rows("smoke", "sync")]) == set()
    figures = orbit.figures("smoke")
    assert figures["steps"] == 3
    assert figures["logprob_gap_max_step"] < GAP
    assert (orbit.root / "smoke" / "report.html").stat().st_size > 10_000


def test_a_real_model_learns(orbit):
    """The main job, cut short: the loop's sign, the swap and the sampling are right together. Seeded, so repeatable."""
    orbit.run("train", "run.name=learn", "trainer.steps=16", "evaluation.prompts=0")
    rewards = [row["reward_mean"] for row in orbit.rows("learn")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:2]) / 2 + 0.15, rewards
    assert orbit.figures("learn")["logprob_gap_max_step"] < GAP
