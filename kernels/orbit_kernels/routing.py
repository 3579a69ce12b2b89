"""Which row of which expert: the routing of a batch as tensors on its device, found without asking the host.

Rows are the (token, slot) pairs sorted by expert, token order kept. A kernel over experts walks tiles: (expert, first
row) pairs in the order of experts, as many as the routing needs; only the device knows how many.

Shape letters: T tokens, k slots, R = T k rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from orbit_kernels.chained import after_previous, chained


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Where every (token, slot) pair went."""

    order: torch.Tensor  # int32 [R]: flat slot (token * k + slot) of each row
    position: torch.Tensor  # int32 [T, k]: row of each slot
    offsets: torch.Tensor  # int32 [E + 1]: expert e has rows offsets[e] to offsets[e + 1]
    made: dict = field(default_factory=dict, compare=False, repr=False)  # what the methods below made, to make it once

    def tiles(self, size: int) -> Tiles:
        """`row_tiles` of this routing."""
        if size not in self.made:
            self.made[size] = row_tiles(self.offsets, self.rows, size)
        return self.made[size]

    def of_every(self, groups: int) -> Routing:
        """The same rows with each `groups` neighbouring experts as one."""
        if groups == 1:
            return self
        key = "of every", groups
        if key not in self.made:
            offsets = self.offsets[::groups].contiguous()
            self.made[key] = Routing(order=self.order, position=self.position, offsets=offsets)
        return self.made[key]

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


RANKS = 32
"""Rows or bounds of experts of a program that ranks."""
RANKED_ROWS = 4096
"""Up to so many rows every row is compared with every other in one launch; sorting is about ten."""


def route(expert_ids: torch.Tensor, experts: int) -> Routing:
    """The routing of expert_ids [T, k], integers in [0, experts)."""
    flat = expert_ids.reshape(-1)
    rows = flat.numel()
    if 0 < rows <= RANKED_ROWS:
        order, position = (torch.empty(rows, dtype=torch.int32, device=flat.device) for _ in range(2))
        offsets = torch.empty(experts + 1, dtype=torch.int32, device=flat.device)
        grid = (triton.cdiv(rows, RANKS) + triton.cdiv(experts + 1, RANKS),)
        _rank[grid](flat, order, position, offsets, rows, experts, RANKS=RANKS, STEP=128, **chained())
        return Routing(order=order, position=position.view(expert_ids.shape), offsets=offsets)
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
    tiles = empty_tiles(rows, experts, size, offsets.device)
    width = triton.next_power_of_2(experts + 1)
    _list_tiles[(experts,)](
        offsets, tiles.expert, tiles.start, tiles.count, E=experts, WIDTH=width, SIZE=size, **chained()
    )
    return tiles


def empty_tiles(rows: int, experts: int, size: int, device: torch.device) -> Tiles:
    """Room for the tiles of any routing of so many rows.

    Each tensor has storage of its own: kernels are compiled anew for a pointer of another alignment.
    """
    bound = max(1, rows // size + min(experts, rows))  # every expert adds at most one partial tile
    expert, start, count = (torch.empty(n, dtype=torch.int32, device=device) for n in (bound, bound, 1))
    return Tiles(expert=expert, start=start, count=count, size=size)


def row_tiles_reference(offsets: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """(expert, first row) of every tile, in order: what `row_tiles` writes."""
    bounds = offsets.tolist()
    return [(e, row) for e in range(len(bounds) - 1) for row in range(bounds[e], bounds[e + 1], size)]


@triton.jit
def _list_tiles(
    offsets, expert, start, count, E: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CHAINED: tl.constexpr
):
    """One program per expert; each counts the tiles of those before it, which is cheaper than a second launch."""
    after_previous(CHAINED)
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


@triton.jit(do_not_specialize=["rows"])
def _rank(ids, order, position, offsets, rows, experts, RANKS: tl.constexpr, STEP: tl.constexpr, CHAINED: tl.constexpr):
    """A row's position is the number of rows before it; the first programs find those, the last the experts' bounds."""
    after_previous(CHAINED)
    row_programs = tl.cdiv(rows, RANKS)
    ranks_rows = tl.program_id(0) < row_programs
    own = tl.program_id(0) * RANKS + tl.arange(0, RANKS)
    bound = own - row_programs * RANKS
    expert = tl.load(ids + own, mask=ranks_rows & (own < rows), other=0).to(tl.int32)
    expert = tl.where(ranks_rows, expert, bound)
    place = tl.where(ranks_rows, own, 0)  # no row comes before row 0 of an expert but those of lower experts
    before = tl.zeros((RANKS,), tl.int32)
    for start in range(0, rows, STEP):
        other = start + tl.arange(0, STEP)
        theirs = tl.load(ids + other, mask=other < rows, other=2147483647).to(tl.int32)[None, :]
        earlier = (theirs < expert[:, None]) | ((theirs == expert[:, None]) & (other[None, :] < place[:, None]))
        before += tl.sum(earlier.to(tl.int32), 1)
    tl.store(position + own, before, mask=ranks_rows & (own < rows))
    tl.store(order + before, own, mask=ranks_rows & (own < rows))
    tl.store(offsets + bound, before, mask=(tl.program_id(0) >= row_programs) & (bound <= experts))
