"""Shaping by length, masking of truncated samples, and the choice of groups that can teach something.

DAPO, 2503.14476. Lengths count response tokens only. Whether a sample is truncated is the engine's finish reason, never
a guess from its last token. Refilling a batch with other prompts is the rollout's work.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft punishment added to the reward of long responses.

    0 up to max_length - buffer, then linearly down to -1 at max_length, -1 beyond (2503.14476, eq. 13).

    Args:
        lengths: [B] response tokens. max_length, buffer: tokens, 0 < buffer <= max_length.

    Returns:
        [B] float64 in [-1, 0].
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer of {buffer} tokens must be between 1 and max_length={max_length}")
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)


def overlong_mask(mask: Tensor, truncated: Tensor) -> Tensor:
    """Mask [B, T] without the tokens of truncated [B] samples, for loss, KL and entropy alike.

    The samples stay in their group's baseline: their reward is real, only their ending is not the policy's.
    """
    return mask & ~truncated[:, None]


def informative_groups(correct: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Dynamic sampling: rows whose group has both right and wrong valid samples, 0 < #correct < #valid.

    Args:
        correct: [B] bool, the raw outcome; a shaped reward would let all-wrong groups of different lengths pass.
        groups: [B] int64. valid: [B] bool, False where the outcome could not be graded.

    Returns:
        [B] bool, the same for all rows of a group, invalid ones included.
    """
    labels, row_group = torch.unique(groups, return_inverse=True)  # [K], [B]
    counts = torch.zeros(len(labels), dtype=torch.int64, device=groups.device)
    right = counts.index_add(0, row_group, (correct & valid).long())
    wrong = counts.index_add(0, row_group, (~correct & valid).long())
    return ((right > 0) & (wrong > 0))[row_group]
