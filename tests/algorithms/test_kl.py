"""KL placements by exact expectation: the gradient over all outcomes, not over samples."""

from __future__ import annotations

import itertools

import pytest
import torch

from orbit_cli.algorithms.kl import ESTIMATORS, kl_estimate, kl_in_reward, kl_loss
from orbit_cli.algorithms.losses import token_losses

THETA, REF, Q = [0.3, -0.1, 0.4], [0.0, 0.2, -0.3], [0.2, 0.5, 0.3]
ONE = torch.ones(3, 1, dtype=torch.bool)  # three one-token sequences: the three outcomes


def outcomes():
    """log pi (with gradient), log ref [3, 1] and theta of a three-token softmax."""
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor(REF, dtype=torch.float64).log_softmax(0)
    return theta, theta.log_softmax(0)[:, None], ref[:, None]


def test_values(golden):
    _, logp, ref = outcomes()
    values = [(logp.exp() * kl_estimate(logp, ref, ONE, kind)).sum().item() for kind in ESTIMATORS]
    assert values == pytest.approx(golden["E_k1,k2,k3"], abs=1e-6)
    assert values[0] == pytest.approx(golden["kl_exact"], abs=1e-6)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_gradients_in_the_loss_and_as_reward(golden, kind):
    theta, logp, ref = outcomes()
    (logp.exp().detach() * kl_estimate(logp, ref, ONE, kind)).sum().backward()
    assert theta.grad.tolist() == pytest.approx(golden[f"grad_{kind}_in_loss"], abs=1e-6)
    theta, logp, ref = outcomes()
    (logp.exp().detach() * kl_estimate(logp, ref, ONE, kind).detach() * logp).sum().backward()
    assert theta.grad.tolist() == pytest.approx(golden[f"grad_{kind}_in_reward"], abs=1e-6)


def test_kl_loss_on_policy_has_the_gradient_of_the_kl(golden):
    theta, logp, ref = outcomes()
    (logp.exp().detach() * kl_loss(logp, ref, ONE)).sum().backward()
    assert theta.grad.tolist() == pytest.approx(golden["kl_true_grad"], abs=1e-6)


def test_kl_loss_off_policy_has_it_too(golden):
    q = torch.tensor(golden["offpolicy_q"], dtype=torch.float64)[:, None]
    theta, logp, ref = outcomes()
    (q * kl_loss(logp, ref, ONE, old_logprobs=q.log())).sum().backward()
    assert theta.grad.tolist() == pytest.approx(golden["grad_k2_times_detached_ratio"], abs=1e-6)
    assert golden["grad_k2_times_detached_ratio"] == golden["kl_true_grad"]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimators_times_the_ratio_with_gradient(golden, kind):
    q = torch.tensor(golden["offpolicy_q"], dtype=torch.float64)[:, None]
    theta, logp, ref = outcomes()
    (q * (logp - q.log()).exp() * kl_estimate(logp, ref, ONE, kind)).sum().backward()
    assert theta.grad.tolist() == pytest.approx(golden[f"grad_{kind}_times_ratio_with_grad"], abs=1e-6)


def test_kl_in_reward_one_token(golden):
    theta, logp, ref = outcomes()
    advantages = kl_in_reward(torch.zeros(3, dtype=torch.float64), logp, ref, ONE, coef=1.0)
    losses, _ = token_losses("reinforce", logprobs=logp, old_logprobs=None, advantages=advantages, mask=ONE)
    (logp.exp().detach() * losses).sum().backward()
    assert theta.grad.tolist() == pytest.approx(golden["grad_k1_in_reward"], abs=1e-6)


def test_kl_in_reward_is_the_gradient_of_the_sequence_kl(rng):
    """Two steps, three tokens, the second step conditioned on the first: only the return-to-go gets this right."""
    theta = torch.randn(4, 3, generator=rng, dtype=torch.float64, requires_grad=True)  # row 0: step 1; 1 + a: step 2
    ref = torch.randn(4, 3, generator=rng, dtype=torch.float64).log_softmax(1)
    logp = theta.log_softmax(1)
    pairs = list(itertools.product(range(3), repeat=2))
    rows = torch.tensor([[0, 1 + a] for a, _ in pairs])  # [9, 2]
    tokens = torch.tensor(pairs)  # [9, 2]
    mask = torch.ones(9, 2, dtype=torch.bool)
    sampled, reference = logp[rows, tokens], ref[rows, tokens]  # [9, 2]
    probability = sampled.sum(1).exp()  # [9]
    exact = torch.autograd.grad((probability * (sampled - reference).sum(1)).sum(), theta, retain_graph=True)[0]

    coef = 0.37
    advantages = kl_in_reward(torch.zeros(9, dtype=torch.float64), sampled, reference, mask, coef)
    losses, _ = token_losses("reinforce", logprobs=sampled, old_logprobs=None, advantages=advantages, mask=mask)
    (probability.detach() * losses.sum(1)).sum().backward()
    torch.testing.assert_close(theta.grad, coef * exact, rtol=1e-10, atol=1e-12)


def test_kl_in_reward_keeps_the_advantage_and_skips_masked_tokens():
    mask = torch.tensor([[True, False, True, False]])
    logp = torch.tensor([[-1.0, torch.nan, -2.0, torch.inf]])
    ref = torch.tensor([[-1.5, 0.0, -1.0, torch.nan]])
    result = kl_in_reward(torch.tensor([2.0]), logp, ref, mask, coef=0.1)
    assert result[0].tolist() == pytest.approx([2.0 - 0.1 * (0.5 - 1.0), 0.0, 2.0 - 0.1 * -1.0, 0.0])


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_equal_policies_give_exactly_zero(kind, rng):
    logp = -torch.rand(2, 5, generator=rng)
    assert torch.equal(kl_estimate(logp, logp.clone(), torch.ones(2, 5, dtype=torch.bool), kind), torch.zeros(2, 5))


def test_far_policies_and_masked_nan_stay_finite():
    logp = torch.tensor([[-300.0, torch.nan]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    kl_loss(logp, torch.zeros(1, 2), mask, old_logprobs=torch.tensor([[0.0, torch.nan]])).sum().backward()
    assert torch.isfinite(logp.grad).all()
    assert torch.isfinite(kl_estimate(logp, torch.zeros(1, 2), mask, "k3")).all()
