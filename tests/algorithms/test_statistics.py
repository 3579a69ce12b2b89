"""pass@k, maj@k and bootstrap intervals against golden values, enumeration and coverage."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest

from orbit_cli.algorithms.statistics import (
    average_at_k,
    bootstrap_interval,
    majority_at_k,
    pass_at_k,
    summarise,
)


def test_pass_at_k_golden(golden):
    for case, expected in golden["pass@k"].items():
        n, c, k = map(int, re.fullmatch(r"n(\d+)c(\d+)k(\d+)", case).groups())
        assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6), case
    assert pass_at_k(10, 3, 5) != pytest.approx(golden["biased 1-(1-c/n)^k n10c3k5"], abs=1e-3)


def test_pass_at_k_is_the_share_of_subsets_with_a_hit():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            hits = [any(i < c for i in subset) for subset in itertools.combinations(range(n), k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(hits))
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match="samples|impossible"):
        pass_at_k(n, c, k)


def test_majority():
    assert majority_at_k(["3", "3", "4"], [True, True, False]) == 1.0
    assert majority_at_k(["3", "4", "4"], [True, False, False]) == 0.0
    assert majority_at_k(["3", "4"], [True, False]) == 0.5  # a tie is a fair draw
    assert majority_at_k([None, None, "3"], [False, False, True]) == 1.0  # no answer, no vote
    assert majority_at_k([None, None], [False, False]) == 0.0
    assert average_at_k([True, False, False, True]) == 0.5


def test_bootstrap_is_seeded_and_does_not_depend_on_memory_batches(monkeypatch):
    values = np.random.default_rng().random(40)
    interval = bootstrap_interval(values, seed=3)
    assert interval == bootstrap_interval(values, seed=3)
    assert interval != bootstrap_interval(values, seed=4)
    assert interval.low < interval.mean < interval.high
    assert interval.mean == pytest.approx(values.mean())
    monkeypatch.setattr("orbit_cli.algorithms.statistics.RESAMPLE_ENTRIES", 100)
    small = bootstrap_interval(values, seed=3)
    assert small.low == pytest.approx(interval.low) and small.high == pytest.approx(interval.high)


def test_bootstrap_width_is_that_of_the_standard_error():
    values = np.random.default_rng(5).normal(size=400)
    interval = bootstrap_interval(values, seed=0, resamples=4000)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.high - interval.mean == pytest.approx(half, rel=0.1)
    assert interval.mean - interval.low == pytest.approx(half, rel=0.1)


def test_bootstrap_coverage_is_close_to_the_level():
    rng = np.random.default_rng(11)
    intervals = [bootstrap_interval(rng.random(50), seed=i, resamples=300) for i in range(300)]
    covered = np.mean([i.low <= 0.5 <= i.high for i in intervals])
    assert 0.90 <= covered <= 0.985


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_bootstrap_of_nothing_or_nan_is_refused(values):
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval(values, seed=0)


def test_summary_leaves_ungraded_samples_out():
    outcomes = summarise(
        correct=[[True, False, None, True], [False, False, False, False], [None] * 4],
        answers=[["5", "4", None, "5"], ["1", "1", "2", None], [None] * 4],
        pass_k=[1, 3],
        seed=0,
    )
    assert outcomes.prompts == 2
    assert outcomes.ungraded == 5
    assert outcomes.accuracy.mean == pytest.approx((2 / 3 + 0) / 2)
    assert outcomes.pass_at[1].mean == pytest.approx(outcomes.accuracy.mean)
    assert outcomes.pass_at[3].mean == pytest.approx(0.5)
    assert outcomes.majority.mean == pytest.approx(0.5)


def test_a_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="none of the samples"):
        summarise([[None]], [[None]], [1], seed=0)


def test_a_k_that_no_prompt_has_enough_graded_samples_for_is_left_out():
    outcomes = summarise([[True, None], [False, None]], [["1", None], ["2", None]], pass_k=[1, 2], seed=0)
    assert list(outcomes.pass_at) == [1] and outcomes.pass_at[1].mean == 0.5 and outcomes.ungraded == 2
