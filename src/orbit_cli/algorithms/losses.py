"""Policy losses per token: log-probs and advantages in, a loss for every token out. Losses are minimised.

Shapes: B sequences of at most T tokens; `mask` [B, T] is true on tokens that the policy sampled. Log-probs are those of
the tempered policy softmax(z / temperature). Summing and dividing is `aggregation.py`, the trainer-engine correction
`corrections.py`, KL `kl.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond any clip, and exp cannot overflow in value or gradient


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What a loss is made of. Everything is 0 where the mask is false, so that no NaN can leak from there."""

    logprobs: Tensor  # [B, T] log pi, with gradient
    log_ratio: Tensor  # [B, T] log pi - log pi_old, clamped to +-MAX_LOG_RATIO
    advantages: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    low: Tensor  # [] 1 - clip_low
    high: Tensor  # [] 1 + clip_high
    dual_clip: float | None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Result of one loss function, before masking."""

    losses: Tensor  # [B, T]
    ratio: Tensor  # [B, T] detached ratio the clip looked at
    clipped_low: Tensor  # [B, T] bool
    clipped_high: Tensor  # [B, T] bool


def _clipped_surrogate(terms: TokenTerms, ratio: Tensor) -> TokenLoss:
    """l = -min(r A, clip(r, low, high) A), and with dual clip c, where A < 0, l = min(l, -c A).

    Written by branch instead of min/clamp: the clipped branch is a constant, so its gradient is exactly 0.
    """
    r, a = ratio.detach(), terms.advantages
    clipped_low = (a < 0) & (r < terms.low)
    clipped_high = (a > 0) & (r > terms.high)
    bound = torch.where(clipped_high, terms.high, torch.where(clipped_low, terms.low, r))  # [B, T], constant
    cut = clipped_low | clipped_high
    if terms.dual_clip is not None:
        dual = (a < 0) & (r > terms.dual_clip)
        bound = torch.where(dual, bound.new_tensor(terms.dual_clip), bound)
        clipped_high = clipped_high | dual
        cut = cut | dual
    return TokenLoss(-torch.where(cut, bound * a, ratio * a), r, clipped_low, clipped_high)


def _ppo_clip(terms: TokenTerms) -> TokenLoss:
    """r_t = pi / pi_old per token, clipped surrogate. PPO 1707.06347; separate bounds 2503.14476; dual 1912.09729."""
    return _clipped_surrogate(terms, terms.log_ratio.exp())


def _gspo(terms: TokenTerms) -> TokenLoss:
    """s_i = exp((1/|o_i|) sum_t log r_t), clipped surrogate with one ratio per sequence. GSPO, 2507.18071.

    In the paper's GSPO-token form s_t = sg(s) pi / sg(pi): same value and, with one advantage per sequence, same
    gradient, and it also takes advantages per token. Aggregate with seq_mean_token_mean; clips are about 3e-4 / 4e-4.
    """
    tokens = terms.mask.sum(dim=1, keepdim=True).clamp_min(1)  # [B, 1], not the padded length
    mean_log_ratio = terms.log_ratio.detach().sum(dim=1, keepdim=True) / tokens  # [B, 1]
    ratio = mean_log_ratio.exp() * (terms.logprobs - terms.logprobs.detach()).exp()  # [B, T]
    return _clipped_surrogate(terms, ratio)


def _cispo(terms: TokenTerms) -> TokenLoss:
    """l = -sg(clip(r, low, high)) A log pi: every token keeps a gradient. CISPO, 2506.13585."""
    r = terms.log_ratio.detach().exp()
    weight = torch.minimum(torch.maximum(r, terms.low), terms.high)
    return TokenLoss(-weight * terms.advantages * terms.logprobs, r, r < terms.low, r > terms.high)


def _reinforce(terms: TokenTerms) -> TokenLoss:
    """l = -A log pi: no ratio, no clip (REINFORCE; with the rloo advantage, 2402.14740)."""
    never = torch.zeros_like(terms.mask)
    return TokenLoss(-terms.advantages * terms.logprobs, terms.log_ratio.detach().exp(), never, never)


LOSSES: dict[str, Callable[[TokenTerms], TokenLoss]] = {
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "reinforce": _reinforce,
}


def token_losses(
    loss: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of every token.

    Args:
        loss: a key of `LOSSES`; the formula and its paper stand at each.
        logprobs: [B, T] of the policy that is being optimised, with gradient.
        old_logprobs: [B, T] of the same tokens when this phase began. None means on-policy: the ratio is
            exp(log pi - sg(log pi)), 1 in value but not in gradient.
        advantages: [B] or [B, T].
        mask: [B, T] bool. Where it is false nothing is read: NaN there reaches neither loss nor gradient.
        clip_low, clip_high: ratios are clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c > 1 bounds the loss of negative advantages by -c A; None switches it off.

    Returns:
        Losses [B, T] in float32 or better, 0 where masked, and scalar tensors, all over the tokens of `mask`: `tokens`,
        `ratio_mean`, `ratio_min`, `ratio_max`, `clip_low_fraction`, `clip_high_fraction` (the share of tokens where the
        clipped branch is strictly the active one; dual clip counts as high). `metrics.merge` joins micro-batches.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    logprobs = torch.where(mask, logprobs.to(dtype), 0.0)  # [B, T]
    old = logprobs.detach() if old_logprobs is None else torch.where(mask, old_logprobs.detach().to(dtype), 0.0)
    per_token = advantages if advantages.dim() == 2 else advantages[:, None]
    terms = TokenTerms(
        logprobs=logprobs,
        log_ratio=(logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=torch.where(mask, per_token.detach().to(dtype), 0.0),
        mask=mask,
        low=logprobs.new_tensor(1 - clip_low),
        high=logprobs.new_tensor(1 + clip_high),
        dual_clip=dual_clip,
    )
    result = LOSSES[loss](terms)
    return torch.where(mask, result.losses, 0.0), _metrics(result, mask)


def _metrics(result: TokenLoss, mask: Tensor) -> dict[str, Tensor]:
    ratio = result.ratio.expand_as(mask)[mask]  # [tokens]
    count = max(ratio.numel(), 1)
    nothing = ratio.numel() == 0
    return {
        "tokens": mask.sum(),
        "ratio_mean": ratio.sum() / count,
        "ratio_min": ratio.new_tensor(torch.inf) if nothing else ratio.min(),
        "ratio_max": ratio.new_tensor(-torch.inf) if nothing else ratio.max(),
        "clip_low_fraction": (result.clipped_low & mask).sum() / count,
        "clip_high_fraction": (result.clipped_high & mask).sum() / count,
    }
