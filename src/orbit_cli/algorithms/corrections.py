"""Correction of the difference between the policy that the trainer computes and the one that produced the tokens.

Token weight w = exp(log pi_old - log mu): pi_old is the trainer's policy when the optimisation phase began, mu what the
engine sampled from. Weights are detached and fixed for the phase: compute them once, on the whole batch. Use them only
where pi_old was recomputed by the trainer: a ratio against mu itself already contains them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_WEIGHT = 20.0


class CorrectionResult(NamedTuple):
    """Weights for the token losses, what survived, and how far apart trainer and engine are."""

    weights: Tensor  # [B, T], 0 where masked or rejected
    kept: Tensor  # [B, T] bool, mask without rejected tokens; use it for the loss divisor unless they shall count
    metrics: dict[str, Tensor]


# (log w, mask, low, high) -> (weights, accepted)
Rule = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def _none(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """1."""
    return torch.ones_like(log_w), torch.ones_like(mask)


def _tis(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(w, high): truncated importance sampling (Yao et al., "Your efficient RL framework secretly ...", 2025)."""
    return _exp(log_w).clamp_max(high), torch.ones_like(mask)


def _mis(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """w, tokens with w > high rejected (masked importance sampling)."""
    w = _exp(log_w)
    return w, w <= high


def _icepop(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """w, tokens outside [low, high] rejected. IcePop, 2510.18855."""
    w = _exp(log_w)
    return w, (w >= low) & (w <= high)


def _sequence_tis(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(W, high), W = exp(sum_t log w): unbiased for sequence objectives, variance grows with length."""
    whole = _exp(log_w.sum(dim=1, keepdim=True)).clamp_max(high)  # [B, 1]
    return whole.expand_as(log_w), torch.ones_like(mask)


def _sequence_mis(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """W, sequences with W > high rejected whole."""
    whole = _exp(log_w.sum(dim=1, keepdim=True))  # [B, 1]
    return whole.expand_as(log_w), (whole <= high).expand_as(mask)


def _geometric_mis(log_w: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """1, sequences whose geometric mean exp(mean_t log w) is outside [low, high] rejected whole.

    The geometric mean does not depend on the length but is biased as a weight, so it only decides.
    """
    tokens = mask.sum(dim=1, keepdim=True).clamp_min(1)  # [B, 1]
    mean = _exp(log_w.sum(dim=1, keepdim=True) / tokens)  # [B, 1]
    return torch.ones_like(log_w), ((mean >= low) & (mean <= high)).expand_as(mask)


RULES: dict[str, Rule] = {
    "none": _none,
    "tis": _tis,
    "mis": _mis,
    "icepop": _icepop,
    "sequence_tis": _sequence_tis,
    "sequence_mis": _sequence_mis,
    "geometric_mis": _geometric_mis,
}


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: str, low: float = 0.5, high: float = 2.0
) -> CorrectionResult:
    """Weights that multiply the token losses.

    Args:
        old_logprobs: [B, T] of the trainer; rollout_logprobs: [B, T] of the engine; same tokens, same temperature.
        mask: [B, T] bool; nothing is read where it is false.
        kind: a key of `RULES`; the formula and its paper stand at each.
        low, high: bounds of the weight, as the rule uses them.

    Returns:
        Weights and kept tokens as in `CorrectionResult`; metrics over the tokens of `mask`: `gap_mean` and `gap_max` of
        |log pi_old - log mu|, `outside_fraction` of w outside [0.5, 2], `k3_mean` (estimates KL(mu || pi_old) from mu's
        samples), `w_mean` and `w_square_mean` (`effective_share` makes one figure of them), `applied_mean` (of the
        weights as returned), `rejected_fraction`, `tokens`.
    """
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    gap = old_logprobs.detach().to(dtype) - rollout_logprobs.detach().to(dtype)
    log_w = torch.where(mask, gap, 0.0)  # [B, T]
    weights, accepted = RULES[kind](log_w, mask, low, high)
    kept = mask & accepted
    applied = torch.where(kept, weights, 0.0)
    return CorrectionResult(applied, kept, _metrics(log_w[mask], kept, applied))


def effective_share(w_mean: Tensor, w_square_mean: Tensor) -> Tensor:
    """Effective sample size (sum w)^2 / sum w^2, as a share of the tokens, from means over all of them."""
    return w_mean.square() / w_square_mean


def _metrics(log_w: Tensor, kept: Tensor, applied: Tensor) -> dict[str, Tensor]:
    tokens = log_w.numel()
    if tokens == 0:
        names = ("gap_mean", "gap_max", "outside_fraction", "k3_mean", "w_mean", "w_square_mean", "applied_mean",
                 "rejected_fraction")  # fmt: skip
        return dict.fromkeys(names, log_w.new_zeros(())) | {"tokens": kept.sum()}
    w = _exp(log_w)  # [tokens]
    return {
        "gap_mean": log_w.abs().mean(),
        "gap_max": log_w.abs().max(),
        "outside_fraction": ((w < 0.5) | (w > 2.0)).double().mean(),
        "k3_mean": (w - 1 - log_w).mean(),
        "w_mean": w.mean(),
        "w_square_mean": w.square().mean(),
        "applied_mean": applied.sum() / tokens,
        "rejected_fraction": 1 - kept.sum() / tokens,
        "tokens": kept.new_tensor(tokens, dtype=torch.int64),
    }


def _exp(log_w: Tensor) -> Tensor:
    return log_w.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
