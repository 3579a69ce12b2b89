"""Policy losses against golden values and gradients, and against NaN and overflow."""

from __future__ import annotations

import pytest
import torch

from orbit_cli.algorithms.aggregation import loss_divisor, loss_weights
from orbit_cli.algorithms.corrections import correction_weights
from orbit_cli.algorithms.losses import LOSSES, token_losses
from orbit_cli.algorithms.metrics import merge


def one_token(ratio, advantage, **clip):
    """Loss and gradient of one token with old log-prob 0."""
    logprobs = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    losses, metrics = token_losses(
        "ppo_clip",
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 1, dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
        **clip,
    )
    losses.sum().backward()
    return [losses.item(), logprobs.grad.item()], metrics


@pytest.mark.parametrize(
    ("key", "clip"),
    [
        ("ppo_clip_lo.2_hi.28_(ratio,A)->(loss,dloss/dlogp)", {"clip_low": 0.2, "clip_high": 0.28}),
        ("dual_clip_c3", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
    ],
)
def test_ppo_clip_golden(golden, key, clip):
    for case, expected in golden[key].items():
        ratio, advantage = map(float, case.split("|"))
        result, metrics = one_token(ratio, advantage, **clip)
        assert result == pytest.approx(expected, abs=1e-6), case
        is_cut = expected[1] == 0
        assert metrics["clip_low_fraction"] + metrics["clip_high_fraction"] == float(is_cut), case
        assert metrics["clip_high_fraction"] == float(is_cut and ratio > 1), case


GSPO = {
    "log_ratio": [[0.1, -0.2, 0.3, 0.0], [0.5, 0.5, 9.0, 9.0]],  # the 9s are masked
    "mask": [[True] * 4, [True, True, False, False]],
    "advantages": [1.0, -1.0],
}


@pytest.mark.parametrize(
    ("loss_key", "grad_key", "clip"),
    [
        ("gspo_unclipped_loss", "gspo_unclipped_grad", (0.99, 1e9)),
        ("gspo_unclipped_loss", "gspo_token_grad_equal", (0.99, 1e9)),
        ("gspo_loss_clip3e-4_4e-4", "gspo_grad_logp", (3e-4, 4e-4)),
    ],
)
def test_gspo_golden(golden, loss_key, grad_key, clip):
    logprobs = torch.tensor(GSPO["log_ratio"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(GSPO["mask"])
    losses, metrics = token_losses(
        "gspo",
        logprobs=logprobs,
        old_logprobs=torch.zeros(2, 4, dtype=torch.float64),
        advantages=torch.tensor(GSPO["advantages"]),
        mask=mask,
        clip_low=clip[0],
        clip_high=clip[1],
    )
    loss = (loss_weights(mask, "seq_mean_token_mean", loss_divisor(mask)) * losses).sum()
    loss.backward()
    assert loss.item() == pytest.approx(golden[loss_key], abs=1e-6)
    assert logprobs.grad.flatten().tolist() == pytest.approx(golden[grad_key], abs=1e-6)
    s = golden["gspo_s"]
    assert metrics["ratio_mean"].item() == pytest.approx((4 * s[0] + 2 * s[1]) / 6, abs=1e-6)


def test_cispo_golden(golden):
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    losses, metrics = token_losses(
        "cispo",
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-1.0, -3.5, -0.4]], dtype=torch.float64),
        advantages=torch.tensor([[1.0, 1.0, -1.0]]),
        mask=torch.ones(1, 3, dtype=torch.bool),
        clip_low=1.0,
        clip_high=0.28,
    )
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(golden["cispo_loss"], abs=1e-6)
    assert logprobs.grad[0].tolist() == pytest.approx(golden["cispo_grad"], abs=1e-6)
    assert metrics["clip_high_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["ratio_max"].item() == pytest.approx(golden["cispo_ratio"][1], abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gradient_is_minus_the_advantage_although_the_ratio_is_one(golden, loss):
    logprobs = torch.tensor([[-0.3, -2.0]], requires_grad=True)
    losses, metrics = token_losses(
        loss,
        logprobs=logprobs,
        old_logprobs=None,
        advantages=torch.tensor([[1.0, -0.5]]),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    losses.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx(golden["onpolicy_grad"])
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1
    if loss in ("ppo_clip", "gspo"):
        assert losses.sum().item() == pytest.approx(golden["onpolicy_ratio_loss"])


@pytest.mark.parametrize("advantages", [torch.tensor([1.0]), torch.tensor([[1.0, torch.nan]])])
def test_nan_behind_the_mask_reaches_neither_loss_nor_gradient(advantages):
    logprobs = torch.zeros(1, 2, requires_grad=True)
    losses, _ = token_losses(
        "ppo_clip",
        logprobs=logprobs,
        old_logprobs=torch.tensor([[0.0, torch.nan]]),
        advantages=advantages,
        mask=torch.tensor([[True, False]]),
    )
    losses.sum().backward()
    assert losses.tolist() == [[-1.0, 0.0]]
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("hidden", [torch.nan, torch.inf, -torch.inf])
def test_masked_log_probs_of_any_kind_are_never_read(loss, hidden):
    logprobs = torch.tensor([[-1.0, hidden]], requires_grad=True)
    losses, metrics = token_losses(
        loss,
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-1.1, hidden]]),
        advantages=torch.tensor([0.7]),
        mask=torch.tensor([[True, False]]),
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_give_finite_gradients(loss, log_ratio, advantage):
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    losses, _ = token_losses(
        loss,
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 1),
        advantages=torch.tensor([advantage]),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(logprobs.grad).all()


def test_decoupled_ppo_is_the_clipped_loss_times_the_correction_weight(golden):
    mask = torch.ones(1, 2, dtype=torch.bool)
    proximal = torch.tensor([[-0.7, -1.4]], dtype=torch.float64)
    logprobs = torch.tensor([[-0.6, -1.6]], dtype=torch.float64, requires_grad=True)
    weights, _, _ = correction_weights(proximal, torch.full((1, 2), -1.0, dtype=torch.float64), mask, "tis", high=2.0)
    losses, _ = token_losses(
        "ppo_clip", logprobs=logprobs, old_logprobs=proximal, advantages=torch.tensor([[1.0, -1.0]]), mask=mask
    )
    (weights * losses).mean().backward()
    assert weights[0].tolist() == pytest.approx(golden["decoupled_wb"], abs=1e-6)
    assert (weights * losses).mean().item() == pytest.approx(golden["decoupled_loss"], abs=1e-6)
    # The golden gradient is of the mean over both tokens, as is the loss.
    assert logprobs.grad[0].tolist() == pytest.approx(golden["decoupled_grad"], abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_log_probs_are_computed_in_float32(loss, rng):
    logprobs = -torch.rand(3, 5, generator=rng)
    old = logprobs + 0.1 * torch.randn(3, 5, generator=rng)
    kwargs = {"advantages": torch.randn(3, generator=rng), "mask": torch.rand(3, 5, generator=rng) > 0.3}
    low, _ = token_losses(loss, logprobs=logprobs.bfloat16(), old_logprobs=old.bfloat16(), **kwargs)
    full, _ = token_losses(loss, logprobs=logprobs.bfloat16().double(), old_logprobs=old.bfloat16().double(), **kwargs)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_of_micro_batches_merge_to_those_of_the_batch(loss, rng):
    logprobs = -torch.rand(6, 7, generator=rng, dtype=torch.float64)
    old = logprobs + 0.4 * torch.randn(6, 7, generator=rng, dtype=torch.float64)
    advantages, mask = torch.randn(6, generator=rng), torch.rand(6, 7, generator=rng) > 0.4
    mask[4] = False

    def metrics(rows):
        return token_losses(
            loss, logprobs=logprobs[rows], old_logprobs=old[rows], advantages=advantages[rows], mask=mask[rows]
        )[1]

    whole = metrics(slice(None))
    merged = merge([metrics(slice(0, 1)), metrics(slice(1, 4)), metrics(slice(4, 5)), metrics(slice(5, 6))])
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value.double(), rtol=1e-6, atol=1e-6)


def test_merging_nothing_or_an_unnamed_rule_is_refused():
    with pytest.raises(ValueError, match="no metrics"):
        merge([])
    with pytest.raises(ValueError, match="speed"):
        merge([{"speed": torch.tensor(1.0), "tokens": torch.tensor(1)}])
