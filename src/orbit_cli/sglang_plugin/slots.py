"""Which adapter slot each token of the running batch uses. Slot 0 is the base.

On a GPU the map lives in one static buffer, so that a captured CUDA graph reads it; on a CPU it is kept as row groups,
so that a batch with a single version costs nothing extra. Left out: who owns a slot (manager.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOKENS = 1 << 17  # tokens of one forward pass at most: 512 KiB of static buffer


class BatchSlots:
    """The slot map of the batch that runs now; every adapted layer holds a reference to the one object."""

    def __init__(self, device: torch.device):
        self.on_gpu = torch.device(device).type == "cuda"
        self.uniform: int | None = 0  # CPU: the slot of all tokens, or None when they differ
        self.groups: list[tuple[int, Tensor]] = []  # CPU: (slot, token rows int64) of a mixed batch
        self.token_slot = torch.zeros(
            MAX_TOKENS if self.on_gpu else 0, dtype=torch.int32, device=device
        )  # [MAX_TOKENS]

    def set(self, slots: list[int], lengths: list[int] | None) -> None:
        """Take over the slots of the requests of a batch; `lengths` are their tokens, None means one each (decode)."""
        if self.on_gpu:
            self._set_static(slots, lengths)
            return
        distinct = sorted(set(slots))
        if len(distinct) <= 1:
            self.uniform, self.groups = (distinct[0] if distinct else 0), []
            return
        per_token = torch.tensor(slots)  # [requests] int64
        if lengths is not None:
            per_token = per_token.repeat_interleave(torch.tensor(lengths))  # [tokens]
        self.uniform = None
        self.groups = [(slot, (per_token == slot).nonzero().squeeze(1)) for slot in distinct]

    def reset(self) -> None:
        """No batch: whatever runs now runs on the base."""
        self.uniform, self.groups = 0, []

    def _set_static(self, slots: list[int], lengths: list[int] | None) -> None:
        host = torch.tensor(slots, dtype=torch.int32)
        if lengths is not None:
            host = host.repeat_interleave(torch.tensor(lengths))
        if host.numel() > MAX_TOKENS:
            raise ValueError(
                f"a forward pass of {host.numel()} tokens exceeds {MAX_TOKENS}; lower chunked_prefill_size"
            )
        # A fresh pinned tensor for each batch: the caching host allocator keeps it until this copy has run.
        self.token_slot[: host.numel()].copy_(host.pin_memory(), non_blocking=True)
