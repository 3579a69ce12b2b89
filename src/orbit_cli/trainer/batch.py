"""Trajectories as tensors.

B samples, T padded tokens. Right padding only: a row is its tokens followed by padding that no mask ever covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from orbit_cli.types import Trajectory


@dataclass(kw_only=True, slots=True)
class Batch:
    """Samples of one optimiser step, or a slice of them."""

    token_ids: Tensor  # [B, T] int64, right-padded with 0
    lengths: Tensor  # [B] int64
    mask: Tensor  # [B, T] bool: tokens in the loss
    rollout_logprobs: Tensor  # [B, T] float32: the engine's, 0 where mask is false
    advantages: Tensor  # [B] float32
    old_logprobs: Tensor | None = None  # [B, T] float32: the trainer's at the start of the phase
    reference_logprobs: Tensor | None = None  # [B, T] float32: of the base without adapter
    token_advantages: Tensor | None = None  # [B, T] float32: with KL in the reward; replaces advantages

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, rows: Tensor | list[int]) -> Batch:
        """The given rows, cut to their longest sample."""
        index = torch.as_tensor(rows, dtype=torch.long)
        width = int(self.lengths[index].max())
        picked = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                value = value[index]
                value = value[:, :width] if value.dim() == 2 else value
            picked[f.name] = value
        return Batch(**picked)


def make_batch(trajectories: Sequence[Trajectory], advantages: Tensor, in_loss: Sequence[bool]) -> Batch:
    """Pad trajectories into a Batch. `advantages` [B]; `in_loss` says which samples the loss sees at all."""
    lengths = [len(t.token_ids) for t in trajectories]
    shape = (len(trajectories), max(lengths))
    token_ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    for row, (trajectory, used) in enumerate(zip(trajectories, in_loss, strict=True)):
        token_ids[row, : lengths[row]] = torch.tensor(trajectory.token_ids)
        if used:
            # From the record of what was sampled, never from `id != pad`: padding may be a real token.
            policy = torch.tensor(trajectory.policy_mask)
            mask[row, : lengths[row]] = policy
            logprobs[row, : lengths[row]] = torch.tensor(trajectory.logprobs, dtype=torch.float32).where(policy, 0.0)
    return Batch(
        token_ids=token_ids,
        lengths=torch.tensor(lengths),
        mask=mask,
        rollout_logprobs=logprobs,
        advantages=advantages.float(),
    )


def micro_batches(batch: Batch, rows: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Split rows, in their order, into parts of at most `token_budget` padded tokens.

    Samples of a prompt stay neighbours, because the model computes a prompt that they share once. A sample longer than
    the budget goes alone. The result of a step does not depend on the split.
    """
    group: list[int] = []
    width = 0
    for row in rows:
        length = int(batch.lengths[row])
        if group and max(width, length) * (len(group) + 1) > token_budget:
            yield group
            group, width = [], 0
        group.append(row)
        width = max(width, length)
    if group:
        yield group


def mini_batches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Rows of each of `count` optimiser steps; the samples of a group stay together.

    >>> mini_batches([0, 0, 1, 1, 2, 2], 2)
    [[0, 1, 2, 3], [4, 5]]
    """
    names = sorted(set(groups))
    per = -(-len(names) // count)
    parts = [set(names[i : i + per]) for i in range(0, len(names), per)]
    return [[row for row, group in enumerate(groups) if group in part] for part in parts]
