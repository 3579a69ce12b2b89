"""Advantages against golden numbers, a float64 reference in plain Python, and the bug reports they must survive."""

from __future__ import annotations

import statistics

import pytest
import torch

from orbit_cli.algorithms.advantages import ESTIMATORS, compute_advantages

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def advantages(rewards, estimator, eps=0.0, groups=None, valid=None, dtype=torch.float64):
    rewards = torch.tensor(rewards, dtype=dtype)
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return compute_advantages(rewards, groups, valid, estimator, eps)


@pytest.mark.parametrize(
    ("key", "estimator", "eps"),
    [
        ("adv_grpo_unbiased_eps0", "grpo", 0.0),
        ("adv_grpo_unbiased_eps1e-4", "grpo", 1e-4),
        ("adv_grpo_unbiased_eps1e-6", "grpo", 1e-6),
        ("adv_drgrpo", "dr_grpo", 0.0),
        ("adv_rloo", "rloo", 0.0),
    ],
)
def test_golden_of_one_group(golden, key, estimator, eps):
    assert advantages([1, 0, 0, 0], estimator, eps).tolist() == pytest.approx(golden[key], abs=1e-6)


@pytest.mark.parametrize(
    ("key", "estimator"),
    [
        ("adv_reinforcepp_globalwhiten_biased", "reinforce_pp"),
        ("adv_reinforcepp_baseline_globalstd_biased", "reinforce_pp_baseline"),
    ],
)
def test_golden_of_the_batch(golden, key, estimator):
    result = advantages([1, 0, 0, 0, 1, 1, 1, 0], estimator, groups=[0] * 4 + [1] * 4)
    assert result.tolist() == pytest.approx(golden[key], abs=1e-6)


def reference(rewards, groups, valid, estimator, eps):
    """The formulas, group by group, in plain Python."""
    members = {g: [r for r, h, v in zip(rewards, groups, valid, strict=True) if h == g and v] for g in set(groups)}
    batch = [r for r, v in zip(rewards, valid, strict=True) if v]
    if estimator == "reinforce_pp":
        mean, std = statistics.fmean(batch), statistics.pstdev(batch)
        return [(r - mean) / std if v else 0.0 for r, v in zip(rewards, valid, strict=True)]
    centred = [r - statistics.fmean(members[g]) if v else 0.0 for r, g, v in zip(rewards, groups, valid, strict=True)]
    if estimator == "dr_grpo":
        return centred
    if estimator == "rloo":
        sizes = [len(members[g]) for g in groups]
        return [c * n / (n - 1) for c, n in zip(centred, sizes, strict=True)]
    if estimator == "grpo":
        return [c / (statistics.stdev(members[g]) + eps) for c, g in zip(centred, groups, strict=True)]
    std = statistics.pstdev([c for c, v in zip(centred, valid, strict=True) if v])
    return [c / std for c in centred]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_the_formula_on_random_unordered_groups_of_unequal_size(estimator, rng):
    groups = torch.tensor([7, 7, 7, 2, 2, 9, 9, 9, 9, 9, 9, 2, 7])[torch.randperm(13, generator=rng)]
    rewards = torch.randn(13, generator=rng, dtype=torch.float64)
    valid = torch.ones(13, dtype=torch.bool)
    valid[(groups == 9).nonzero()[0]] = False
    rewards[~valid] = torch.nan
    result = compute_advantages(rewards, groups, valid, estimator, 1e-6)
    expected = reference(rewards.tolist(), groups.tolist(), valid.tolist(), estimator, 1e-6)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-6])
@pytest.mark.parametrize("reward", [0.1, 0.95, 1e4 / 3])
def test_equal_rewards_give_exactly_zero(estimator, eps, reward):
    result = advantages([reward] * 7, estimator, eps, dtype=torch.float32)
    assert torch.equal(result, torch.zeros(7))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[1.0, 0, 0, 0], [0.0] + [0.95] * 7])
def test_leave_one_out_residues_never_explode(estimator, rewards):
    result = advantages(rewards, estimator, dtype=torch.float32)
    assert torch.isfinite(result).all() and result.abs().max() <= 10


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_failed_reward_is_not_zero_and_shifts_no_baseline(estimator):
    with_failure = advantages([1, 0, 0, float("nan")], estimator, valid=[True, True, True, False])
    assert with_failure[:3].tolist() == advantages([1, 0, 0], estimator).tolist()
    assert with_failure[3] == 0


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS + ("reinforce_pp_baseline",))
def test_a_sibling_without_trainable_tokens_shifts_no_baseline(estimator):
    assert advantages([100, 1], estimator, valid=[False, True]).tolist() == [0, 0]


def test_a_group_without_baseline_stays_out_of_the_batch_std():
    alone = advantages([1, 0, 0, 0, 5], "reinforce_pp_baseline", groups=[0, 0, 0, 0, 1])
    assert alone[:4].tolist() == advantages([1, 0, 0, 0], "reinforce_pp_baseline").tolist()
    assert alone[4] == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_valid_gives_zeros(estimator):
    assert advantages([float("nan")] * 3, estimator, valid=[False] * 3).tolist() == [0, 0, 0]


def test_a_valid_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="mark its response invalid"):
        advantages([1.0, float("inf")], "grpo")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_order_of_rows_does_not_matter(estimator, rng):
    rewards = torch.rand(12, generator=rng, dtype=torch.float64)
    groups, valid = torch.arange(12) // 4, torch.arange(12) != 5
    order = torch.randperm(12, generator=rng)
    straight = compute_advantages(rewards, groups, valid, estimator, 1e-6)
    shuffled = compute_advantages(rewards[order], groups[order], valid[order], estimator, 1e-6)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-12, atol=1e-12)
