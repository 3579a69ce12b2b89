"""Trainer-engine corrections against golden weights and float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch

from orbit_cli.algorithms.corrections import RULES, correction_weights, effective_share

LOG_W = [0.1, -1.5, 0.8, -10.0, 0.3]


def correct(kind, low=0.5, high=2.0, log_w=LOG_W):
    gap = torch.tensor([log_w], dtype=torch.float64)
    return correction_weights(gap, torch.zeros_like(gap), torch.ones(1, len(log_w), dtype=torch.bool), kind, low, high)


@pytest.mark.parametrize(
    ("key", "kind", "low", "high"),
    [
        ("mis_ratios", "mis", 0.5, 1e9),
        ("tis_C2", "tis", 0.5, 2.0),
        ("icepop_0.5_5", "icepop", 0.5, 5.0),
        ("icepop_0.5_2", "icepop", 0.5, 2.0),
    ],
)
def test_token_weights_golden(golden, key, kind, low, high):
    weights, kept, metrics = correct(kind, low, high)
    assert weights[0].tolist() == pytest.approx(golden[key], abs=1e-6)
    assert kept[0].tolist() == [w != 0 for w in golden[key]]
    assert metrics["rejected_fraction"].item() == pytest.approx(sum(w == 0 for w in golden[key]) / 5)


def test_mis_rejects_only_above():
    weights, kept, _ = correct("mis", high=2.0)
    assert kept[0].tolist() == [True, True, False, True, True]
    assert weights[0, 1].item() == pytest.approx(math.exp(-1.5))


def test_sequence_weight_golden(golden):
    weights, kept, _ = correct("sequence_tis")
    assert weights[0].tolist() == pytest.approx([golden["seq_is_sum"]] * 5, rel=1e-3)
    assert kept.all()
    far = [0.5, 0.5, 0.5]  # W = exp(1.5) = 4.48
    assert correct("sequence_tis", log_w=far).weights[0].tolist() == pytest.approx([2.0] * 3)
    assert not correct("sequence_mis", log_w=far).kept.any()
    assert correct("sequence_mis", high=5.0, log_w=far).weights[0].tolist() == pytest.approx([math.exp(1.5)] * 3)


def test_geometric_mean_only_decides(golden):
    mean = golden["seq_geo"]
    accepted, rejected = correct("geometric_mis", low=mean - 1e-5), correct("geometric_mis", low=mean + 1e-5)
    assert accepted.kept.all() and accepted.weights.tolist() == [[1.0] * 5]
    assert not rejected.kept.any() and rejected.weights.tolist() == [[0.0] * 5]


@pytest.mark.parametrize("kind", RULES)
def test_masked_positions_are_never_read_and_weigh_nothing(kind):
    mask = torch.tensor([[True, True, False, False]])
    old = torch.tensor([[-1.0, -2.0, torch.nan, torch.inf]], requires_grad=True)
    rollout = torch.tensor([[-1.1, -1.9, -1.0, torch.nan]])
    weights, kept, metrics = correction_weights(old, rollout, mask, kind)
    bare = correction_weights(old[:, :2], rollout[:, :2], mask[:, :2], kind)
    assert weights.tolist() == [[*bare.weights[0].tolist(), 0.0, 0.0]]
    assert kept.tolist() == mask.tolist()
    assert not weights.requires_grad
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in bare.metrics.items()}


@pytest.mark.parametrize("kind", RULES)
def test_no_tokens_and_far_policies_stay_finite(kind):
    none = torch.zeros(2, 3, dtype=torch.bool)
    weights, _, metrics = correction_weights(torch.zeros(2, 3), torch.zeros(2, 3), none, kind)
    assert not weights.any() and all(torch.isfinite(v) for v in metrics.values())
    far = correct(kind, log_w=[300.0, -300.0, 300.0])
    assert torch.isfinite(far.weights).all() and all(torch.isfinite(v) for v in far.metrics.values())
    assert far.metrics.keys() == metrics.keys()


def test_metrics_are_those_of_the_formulas(rng):
    old = -torch.rand(4, 9, generator=rng, dtype=torch.float64)
    rollout = old + 0.8 * torch.randn(4, 9, generator=rng, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=rng) > 0.3
    log_w = (old - rollout)[mask].tolist()
    w = [math.exp(x) for x in log_w]
    metrics = correction_weights(old, rollout, mask, "none").metrics
    assert metrics["gap_mean"].item() == pytest.approx(sum(map(abs, log_w)) / len(w))
    assert metrics["gap_max"].item() == pytest.approx(max(map(abs, log_w)))
    assert metrics["outside_fraction"].item() == pytest.approx(sum(not 0.5 <= x <= 2 for x in w) / len(w))
    assert metrics["k3_mean"].item() == pytest.approx(sum(a - 1 - b for a, b in zip(w, log_w, strict=True)) / len(w))
    share = effective_share(metrics["w_mean"], metrics["w_square_mean"])
    assert share.item() == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / len(w))
    assert metrics["tokens"].item() == len(w)
