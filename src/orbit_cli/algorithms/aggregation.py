"""Aggregation: by what the token losses are divided. The loss of an optimiser step is sum(weights * losses).

Shapes: B sequences, one per row, of at most T tokens. The divisor counts tokens and sequences of the *whole* optimiser
step (all micro-batches, all ranks) before the first backward; a micro-batch then only multiplies and sums, so the step
does not depend on the split. Which tokens count is the caller's mask: leave rejected tokens out of it, or keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossDivisor:
    """Counts over one optimiser step; add those of micro-batches and ranks.

    >>> LossDivisor(tokens=100, sequences=3) + LossDivisor(tokens=900, sequences=5)
    LossDivisor(tokens=1000, sequences=8)
    """

    tokens: int = 0  # tokens whose mask is true
    sequences: int = 0  # sequences with at least one such token; fully masked ones count nowhere

    def __add__(self, other: LossDivisor) -> LossDivisor:
        return LossDivisor(self.tokens + other.tokens, self.sequences + other.sequences)


def loss_divisor(mask: Tensor) -> LossDivisor:
    """Counts of one mask [B, T]."""
    per_sequence = mask.sum(dim=1)  # [B]
    return LossDivisor(tokens=int(per_sequence.sum()), sequences=int((per_sequence > 0).sum()))


def _token_mean(lengths: Tensor, divisor: LossDivisor, constant: int | None) -> Tensor:
    """Every token weighs 1 / tokens. DAPO (2503.14476) in its batch form, over all groups together; CISPO."""
    return torch.full_like(lengths, 1.0 / divisor.tokens)


def _seq_mean_token_mean(lengths: Tensor, divisor: LossDivisor, constant: int | None) -> Tensor:
    """1 / (sequences |o_i|). GRPO (2402.03300) and GSPO (2507.18071)."""
    return 1.0 / (divisor.sequences * lengths.clamp_min(1))


def _seq_mean_token_sum(lengths: Tensor, divisor: LossDivisor, constant: int | None) -> Tensor:
    """1 / sequences. REINFORCE and RLOO (2402.14740) on whole sequences."""
    return torch.full_like(lengths, 1.0 / divisor.sequences)


def _constant(lengths: Tensor, divisor: LossDivisor, constant: int | None) -> Tensor:
    """1 / (sequences L), L fixed in the config. Dr.GRPO, 2503.20783."""
    if constant is None or constant < 1:
        raise ValueError(f"aggregation=constant needs a constant of at least 1, got {constant}")
    return torch.full_like(lengths, 1.0 / (divisor.sequences * constant))


AGGREGATIONS: dict[str, Callable[[Tensor, LossDivisor, int | None], Tensor]] = {
    "token_mean": _token_mean,
    "seq_mean_token_mean": _seq_mean_token_mean,
    "seq_mean_token_sum": _seq_mean_token_sum,
    "constant": _constant,
}


def loss_weights(
    mask: Tensor, aggregation: str, divisor: LossDivisor, *, constant: int | None = None, averaged_over: int = 1
) -> Tensor:
    """Weight of every token's loss, such that the step's loss is sum(weights * losses) over all its micro-batches.

    Args:
        mask: [B, T] bool, tokens that count.
        aggregation: a key of `AGGREGATIONS`.
        divisor: counts of the whole optimiser step, made of masks by the same rule as `mask`.
        constant: the divisor L of aggregation=constant, in tokens.
        averaged_over: number of ranks over which gradients will be averaged (DDP, FSDP); 1 where they are summed.

    Returns:
        [B, T] float32, 0 where masked, and all 0 for an empty step (skip it then: there is no gradient).
    """
    lengths = mask.sum(dim=1, keepdim=True).float()  # [B, 1]
    if divisor.tokens == 0:
        return torch.zeros(mask.shape, device=mask.device)
    weights = AGGREGATIONS[aggregation](lengths, divisor, constant) * averaged_over  # [B, 1]
    return torch.where(mask, weights, 0.0)
