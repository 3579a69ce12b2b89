"""KL to the reference policy: estimators, and the two placements whose gradient is that of KL(pi || ref).

With d = log pi - log ref on the sampled token: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Under pi the means of k1 and
k3 are the KL. A good value estimator is not a good loss: k1 in the loss has gradient 0, k3 in the loss has the gradient
of the other KL. So: k1 in the reward, or k2 in the loss (2506.09477, 2510.01555, 2512.21852). Shapes as in `losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orbit_cli.algorithms.losses import MAX_LOG_RATIO

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 + d,
}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate [B, T], 0 where masked, with the gradient of its formula. Source: Schulman, "Approximating KL
    divergence" (2020)."""
    return torch.where(mask, ESTIMATORS[kind](_difference(logprobs, ref_logprobs, mask)), 0.0)


def kl_in_reward(advantages: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Advantages per token with the KL as a penalty on the reward: A_t = A - coef * sum_{s >= t} k1_s.

    The sum over later tokens is the return: a token also answers for the divergence that it leads to (2506.09477).
    It is added after the normalisation of `advantages`, which would otherwise turn coef into coef / std of the group.

    Args:
        advantages: [B]; logprobs: [B, T] of the policy that sampled (detached here); ref_logprobs, mask: [B, T].

    Returns:
        [B, T], 0 where masked.
    """
    k1 = kl_estimate(logprobs.detach(), ref_logprobs.detach(), mask, "k1")  # [B, T]
    to_go = k1.flip(1).cumsum(1).flip(1)  # [B, T]
    return torch.where(mask, advantages[:, None] - coef * to_go, 0.0)


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """KL term for the loss, per token: sg(pi / pi_old) * k2, whose expected gradient is that of KL(pi || ref).

    Args:
        logprobs: [B, T] with gradient; ref_logprobs, mask: [B, T].
        old_logprobs: [B, T] of the policy that sampled the tokens; None means on-policy (ratio 1).

    Returns:
        [B, T], 0 where masked; multiply by the coefficient and aggregate by the same weights as the policy loss. Its
        value estimates the KL only near the reference; report the mean of k1 or k3.
    """
    k2 = kl_estimate(logprobs, ref_logprobs.detach(), mask, "k2")
    if old_logprobs is None:
        return k2
    log_ratio = _difference(logprobs.detach(), old_logprobs.detach(), mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * k2


def _difference(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    dtype = torch.promote_types(left.dtype, torch.float32)
    return torch.where(mask, left.to(dtype), 0.0) - torch.where(mask, right.to(dtype), 0.0)
