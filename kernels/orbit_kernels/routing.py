"""Which row of which expert: the routing of a batch as tensors on its device, found without asking the host.

Rows are the (token, slot) pairs sorted by expert, token order kept. A kernel over experts walks tiles: (expert, first
row) pairs in the order of experts, as many as the routing needs; only the device knows how many.

Shape letters: T tokens, k slots, R = T k rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Where every (token, slot) pair went."""

    order: torch.Tensor  # int32 [R]: flat slot (token * k + slot) of each row
    position: torch.Tensor  # int32 [T, k]: row of each slot
    offsets: torch.Tensor  # int32 [E + 1]: expert e has rows offsets[e] to offsets[e + 1]

    @property
    def rows(self) -> int:
        return self.order.numel()

    @property
    def experts(self) -> int:
        return self.offsets.numel() - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Row tiles of at most `size` rows, none of which spans two experts."""

    expert: torch.Tensor  # int32 [bound]
    start: torch.Tensor  # int32 [bound]: the first row
    count: torch.Tensor  # int32 [1]: how many entries are filled
    size: int


def route(expert_ids: torch.Tensor, experts: int) -> Routing:
    """The routing of expert_ids [T, k], integers in [0, experts)."""
    flat = expert_ids.reshape(-1)
    by_expert, order = torch.sort(flat.to(torch.int32), stable=True)  # [R]
    position = torch.empty_like(by_expert).scatter_(
        0, order, torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    )
    bounds = torch.arange(experts + 1, dtype=torch.int32, device=flat.device)
    offsets = torch.searchsorted(by_expert, bounds, out_int32=True)  # [E + 1]
    return Routing(order=order.to(torch.int32), position=position.view(expert_ids.shape), offsets=offsets)


def row_tiles(offsets: torch.Tensor, rows: int, size: int) -> Tiles:
    """Tiles of `size` rows over offsets [E + 1]; an expert's last tile holds what is left, empty experts have none."""
    experts = offsets.numel() - 1
    bound = rows // size + min(experts, rows)  # every expert adds at most one partial tile
    expert, start = torch.empty(2, max(bound, 1), dtype=torch.int32, device=offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=offsets.device)
    width = triton.next_power_of_2(experts + 1)
    _list_tiles[(experts,)](offsets, expert, start, count, E=experts, WIDTH=width, SIZE=size)
    return Tiles(expert=expert, start=start, count=count, size=size)


def row_tiles_reference(offsets: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """(expert, first row) of every tile, in order: what `row_tiles` writes."""
    bounds = offsets.tolist()
    return [(e, row) for e in range(len(bounds) - 1) for row in range(bounds[e], bounds[e + 1], size)]


@triton.jit
def _list_tiles(offsets, expert, start, count, E: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """One program per expert; each counts the tiles of those before it, which is cheaper than a second launch."""
    own = tl.program_id(0)
    index = tl.arange(0, WIDTH)
    first = tl.load(offsets + index, mask=index < E, other=0)
    last = tl.load(offsets + index + 1, mask=index < E, other=0)
    tiles = (last - first + SIZE - 1) // SIZE  # [WIDTH]
    before = tl.sum(tl.where(index < own, tiles, 0), 0)
    begin, end = tl.load(offsets + own), tl.load(offsets + own + 1)
    for tile in range(0, (end - begin + SIZE - 1) // SIZE):
        tl.store(expert + before + tile, own)
        tl.store(start + before + tile, begin + tile * SIZE)
    if own == E - 1:
        tl.store(count, tl.sum(tiles, 0))
