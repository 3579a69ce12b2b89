"""Loss divisors: golden values, and that no split, order, padding or masked row changes the step."""

from __future__ import annotations

import pytest
import torch

from orbit_cli.algorithms.aggregation import AGGREGATIONS, LossDivisor, loss_divisor, loss_weights
from orbit_cli.algorithms.corrections import correction_weights


def masks(lengths, width):
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def step_loss(losses, mask, aggregation, splits, constant=8, averaged_over=1):
    """Loss of one optimiser step whose rows come in micro-batches."""
    divisor = sum((loss_divisor(mask[rows]) for rows in splits), LossDivisor())
    parts = [
        (loss_weights(mask[r], aggregation, divisor, constant=constant, averaged_over=averaged_over) * losses[r]).sum()
        for r in splits
    ]
    return [part.item() for part in parts]


@pytest.mark.parametrize(
    ("key", "aggregation"),
    [
        ("agg_token_mean", "token_mean"),
        ("agg_seq_mean_token_mean", "seq_mean_token_mean"),
        ("agg_seq_mean_token_sum", "seq_mean_token_sum"),
        ("agg_drgrpo_Lmax8", "constant"),
    ],
)
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("splits", [[slice(0, 2)], [slice(0, 1), slice(1, 2)]])
def test_golden_at_any_padding_and_micro_batch(golden, key, aggregation, width, splits):
    mask = masks([2, 6], width)
    losses = torch.tensor([[1.0], [3.0]]).expand(2, width)
    assert sum(step_loss(losses, mask, aggregation, splits)) == pytest.approx(golden[key])


def test_unequal_micro_batches_and_ranks(golden):
    mask = masks([100, 900], 900)
    losses = torch.tensor([[2.0], [0.5]]).expand(2, 900)
    splits = [slice(0, 1), slice(1, 2)]
    assert sum(step_loss(losses, mask, "token_mean", splits)) == pytest.approx(golden["agg_100x2_900x0.5_correct"])
    ranks = step_loss(losses, mask, "token_mean", splits, averaged_over=2)
    assert ranks == pytest.approx(golden["ddp_rank_losses_scaled"])
    assert sum(ranks) / 2 == pytest.approx(golden["ddp_mean_of_scaled"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_the_split(aggregation, rng):
    lengths = [1, 3, 8, 20]
    inputs, mask = torch.randn(4, 20, 3, generator=rng, dtype=torch.float64), masks(lengths, 20)

    def gradient(splits):
        weight = torch.tensor([0.3, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
        divisor = sum((loss_divisor(mask[r]) for r in splits), LossDivisor())
        for r in splits:
            width = int(mask[r].sum(1).max())  # each micro-batch padded to its own width
            losses = (inputs[r, :width] @ weight).tanh()
            (loss_weights(mask[r, :width], aggregation, divisor, constant=20) * losses).sum().backward()
        return weight.grad

    whole = gradient([slice(0, 4)])
    for splits in ([slice(0, 1), slice(1, 4)], [slice(0, 2), slice(2, 4)], [slice(i, i + 1) for i in range(4)]):
        torch.testing.assert_close(gradient(splits), whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fully_masked_samples_count_nowhere(aggregation):
    alone = masks([4], 4)
    with_masked = masks([4, 0], 4)
    losses = torch.ones(2, 4)
    expected = step_loss(losses[:1], alone, aggregation, [slice(0, 1)])
    assert sum(step_loss(losses, with_masked, aggregation, [slice(0, 1), slice(1, 2)])) == pytest.approx(sum(expected))
    if aggregation == "token_mean":
        assert sum(expected) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_step_is_zero_not_nan(aggregation):
    mask = masks([0, 0], 4)
    weights = loss_weights(mask, aggregation, loss_divisor(mask), constant=8)
    assert torch.equal(weights, torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("key", "counts_rejected"),
    [("mis_loss_reject_not_in_denominator", False), ("mis_loss_reject_in_denominator", True)],
)
def test_rejected_tokens_leave_the_divisor_with_the_mask(golden, key, counts_rejected):
    mask = torch.ones(1, 5, dtype=torch.bool)
    log_w = torch.tensor([[0.1, -1.5, 0.8, -10.0, 0.3]], dtype=torch.float64)
    weights, kept, _ = correction_weights(log_w, torch.zeros_like(log_w), mask, "icepop", 0.5, 2.0)
    counted = mask if counts_rejected else kept
    loss = (loss_weights(counted, "token_mean", loss_divisor(counted)) * weights).sum()
    assert loss.item() == pytest.approx(golden[key], abs=1e-6)


@pytest.mark.parametrize("constant", [None, 0])
def test_a_missing_constant_is_refused(constant):
    mask = masks([2], 2)
    with pytest.raises(ValueError, match="constant"):
        loss_weights(mask, "constant", loss_divisor(mask), constant=constant)
