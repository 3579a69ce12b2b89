"""The trainer ranks of a run: one on a CPU or a single GPU, more under torchrun.

Samples are spread over ranks; every rank holds the whole adapter. Gradients are summed, not averaged, because the loss
weights already hold the divisors of the whole optimiser step (RL: distributed scaling).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, ranks)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if world()[1] > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def gather_over_ranks(value: Any) -> list[Any]:
    """A picklable value of every rank, in rank order, on all ranks."""
    ranks = world()[1]
    if ranks == 1:
        return [value]
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, value)
    return gathered


def own_share(rows: list[int]) -> list[int]:
    """The rows of this rank, a contiguous part. A rank may have none: it still joins every collective."""
    rank, ranks = world()
    return rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
