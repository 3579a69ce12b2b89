"""Advantages: the rewards of a batch of responses turned into one number per response.

Shapes: B responses (rows, in any order), G of them per prompt ("group"). Estimators are compared within a group
(grpo, dr_grpo, rloo), over the batch (reinforce_pp), or both (reinforce_pp_baseline). Call this on whole groups, before
any sharding, sorting, packing or filtering. Reward shaping is in `shaping.py`, a KL to the reference in `kl.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_REWARDS = 1e-6  # a group whose rewards span at most this is constant: its advantages are exactly 0


@dataclass(frozen=True, slots=True)
class Groups:
    """The valid rows of a batch with their group statistics; float64 because a rounded mean is no mean.

    Seven rewards of 0.1 in float32 differ from their own mean by 7e-9, which a small epsilon blows up to 0.4.
    """

    rewards: Tensor  # [V] float64, valid rows only
    centred: Tensor  # [V] reward minus the mean of its group
    size: Tensor  # [V] float64, valid responses in the row's group
    std: Tensor  # [V] unbiased standard deviation (divided by G - 1) of the row's group
    comparable: Tensor  # [V] bool, group has at least two valid responses and they differ


def _group(rewards: Tensor, groups: Tensor) -> Groups:
    labels, row_group = torch.unique(groups, return_inverse=True)  # [K], [V]
    zeros = rewards.new_zeros(len(labels))  # [K]
    size = zeros.index_add(0, row_group, torch.ones_like(rewards))
    mean = zeros.index_add(0, row_group, rewards) / size
    centred = rewards - mean[row_group]
    # Two passes: E[x^2] - E[x]^2 leaves a residue of the size of the rounding error of x^2.
    variance = zeros.index_add(0, row_group, centred.square()) / (size - 1).clamp_min(1)
    high = zeros.scatter_reduce(0, row_group, rewards, "amax", include_self=False)
    low = zeros.scatter_reduce(0, row_group, rewards, "amin", include_self=False)
    comparable = (size >= 2) & (high - low > EQUAL_REWARDS)
    return Groups(rewards, centred, size[row_group], variance.sqrt()[row_group], comparable[row_group])


def _grpo(g: Groups, eps: float) -> Tensor:
    """A = (R - mean_g) / (std_g + eps), std unbiased. GRPO, 2402.03300."""
    return _only(g.comparable, g.centred / (g.std + eps))


def _dr_grpo(g: Groups, eps: float) -> Tensor:
    """A = R - mean_g. Dr.GRPO, 2503.20783: dividing by the std overweights prompts that are too easy or too hard."""
    return _only(g.comparable, g.centred)


def _rloo(g: Groups, eps: float) -> Tensor:
    """A = R - mean of the others = G/(G-1) (R - mean_g). RLOO, 2402.14740."""
    return _only(g.comparable, g.centred * g.size / (g.size - 1).clamp_min(1))


def _reinforce_pp(g: Groups, eps: float) -> Tensor:
    """A = (R - mean_B) / std_B over the batch, std biased (divided by B). REINFORCE++, 2501.03262."""
    if len(g.rewards) == 0 or g.rewards.max() - g.rewards.min() <= EQUAL_REWARDS:
        return torch.zeros_like(g.rewards)
    centred = g.rewards - g.rewards.mean()
    return centred / centred.square().mean().sqrt()


def _reinforce_pp_baseline(g: Groups, eps: float) -> Tensor:
    """A = (R - mean_g) / std over the batch of that difference, std biased. REINFORCE++-baseline, 2501.03262.

    Groups with fewer than two valid responses have no baseline and stay out of the batch's std too.
    """
    centred = _only(g.comparable, g.centred)
    has_baseline = g.size >= 2
    if not g.comparable.any():
        return torch.zeros_like(centred)
    mean = centred[has_baseline].mean()  # 0 up to rounding, by construction
    return centred / (centred[has_baseline] - mean).square().mean().sqrt()


def _only(keep: Tensor, values: Tensor) -> Tensor:
    return torch.where(keep, values, 0.0)


ESTIMATORS: dict[str, Callable[[Groups, float], Tensor]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}


def compute_advantages(rewards: Tensor, groups: Tensor, valid: Tensor, estimator: str, eps: float = 1e-6) -> Tensor:
    """Advantage of every response.

    Args:
        rewards: [B] float, one scalar per response; what stands in invalid rows is never read (NaN is fine).
        groups: [B] int64, label of the prompt; rows of one prompt share it, in any order.
        valid: [B] bool, False for a reward that could not be computed or a response without a trainable token: such a
            row is left out of every mean and std and gets 0.
        estimator: a key of `ESTIMATORS`; the formula and its paper stand at each.
        eps: added to the group's std by grpo; the other estimators do not use it.

    Returns:
        [B] of the dtype of `rewards`, computed in float64. Groups of equal rewards get exactly 0, and so do groups with
        fewer than two valid responses (reinforce_pp, which knows no groups, excepted).

    Raises:
        ValueError: a valid reward is NaN or infinite.
    """
    advantages = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)  # [B]
    usable = rewards[valid].to(torch.float64)  # [V]
    if not torch.isfinite(usable).all():
        raise ValueError("a reward marked valid is NaN or infinite; mark its response invalid instead")
    advantages[valid] = ESTIMATORS[estimator](_group(usable, groups[valid]), eps)
    return advantages.to(rewards.dtype)
