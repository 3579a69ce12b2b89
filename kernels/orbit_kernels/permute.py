"""Moving rows between token order and expert order: gather before the grouped products, weighted sum after them.

Shape letters: T tokens, k slots, R = T k rows in the order of `routing.Routing`, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orbit_kernels.chained import after_previous, chained
from orbit_kernels.fragments import fragment_order, in_fragment_order
from orbit_kernels.routing import Routing, empty_tiles, route

DISPATCHED_ROWS = 32
"""Up to so many rows one launch does all there is before the first product; every program ranks all rows.

On an H200 it takes 1.9 us for 8 rows instead of 4.9, for 128 rows 8 instead of 5.5.
"""


def dispatch_rows(
    x: torch.Tensor, expert_ids: torch.Tensor, experts: int, size: int, in_order: bool = False
) -> tuple[Routing, torch.Tensor]:
    """`route` of expert_ids [T, k] and `gather_rows` of x [T, K]; of few rows in one launch, with tiles of `size`."""
    rows, columns = expert_ids.numel(), x.shape[1]
    if not 0 < rows <= DISPATCHED_ROWS:
        routing = route(expert_ids, experts)
        return routing, gather_rows(x, routing, in_order)
    tiles = empty_tiles(rows, experts, size, x.device)
    order, position, offsets = (
        torch.empty(length, dtype=torch.int32, device=x.device) for length in (rows, rows, experts + 1)
    )
    out = x.new_empty(rows, columns)
    width = min(128, max(32, triton.next_power_of_2(columns)))
    _dispatch[(triton.cdiv(columns, width),)](
        expert_ids.reshape(-1), x, order, position, offsets, tiles.expert, tiles.start, tiles.count, out, rows, experts,
        columns, expert_ids.shape[1],
        SIZE=size, IN_ORDER=in_order, ROWS=max(16, triton.next_power_of_2(rows)), WIDTH=width,
        **chained(), num_warps=4 if rows <= 32 else 8,
    )  # fmt: skip
    routing = Routing(order=order, position=position.view(expert_ids.shape), offsets=offsets, made={size: tiles})
    return routing, out


def gather_rows(
    x: torch.Tensor,
    routing: Routing,
    in_order: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows [R, K]: x [T, K] of each row's token.

    `in_order` writes the columns in `fragment_order`, as 4-bit products read them; K must be a multiple of 32 then.
    """
    columns, slots = x.shape[1], routing.position.shape[1]
    out = x.new_empty(routing.rows, columns) if out is None else out
    if routing.rows:
        # All rows of one range of columns before the next: a token is read k times, all but once from L2.
        width = min(128, max(32, triton.next_power_of_2(columns)))
        _gather[(triton.cdiv(routing.rows, 16), triton.cdiv(columns, width))](
            x, routing.order, out, routing.rows, columns, slots, IN_ORDER=in_order, ROWS=16, WIDTH=width,
            STORE=store_modifier(out), **chained(),
        )  # fmt: skip
    return out


def gather_rows_reference(x: torch.Tensor, routing: Routing, in_order: bool = False) -> torch.Tensor:
    """`gather_rows` in PyTorch."""
    rows = x[routing.order.long() // routing.position.shape[1]]
    return rows[:, fragment_order(x.shape[1], x.device)] if in_order else rows


def combine_rows(rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None) -> torch.Tensor:
    """y [T, K]: the sum over slots 0..k-1, in this order and in float32, of a token's rows [R, K], or weighted sum."""
    tokens, slots = routing.position.shape
    columns = rows.shape[1]
    out = rows.new_empty(tokens, columns)
    if tokens:
        width = min(1024, max(32, triton.next_power_of_2(columns)))
        _combine[(tokens, triton.cdiv(columns, width))](
            rows, routing.position, weights, out, columns,
            SLOTS=slots, WEIGHTED=weights is not None, WIDTH=width, **chained(),
        )  # fmt: skip
    return out


def combine_rows_reference(rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None = None) -> torch.Tensor:
    """`combine_rows` in PyTorch."""
    by_slot = rows[routing.position.long()].float()  # [T, k, K]
    if weights is not None:
        by_slot = by_slot * weights.float().unsqueeze(-1)
    return sum(by_slot.unbind(1)).to(rows.dtype)


def store_modifier(out: torch.Tensor) -> str:
    """How gathered rows are stored: where L2 cannot hold them anyway, so that they leave it to the tokens.

    7 to 11% of a gather at 16,384 tokens of Kimi-K2.6 on an H200.
    """
    return ".cs" if out.numel() * out.element_size() > 1 << 28 else ""


@triton.jit(do_not_specialize=["rows"])
def _dispatch(
    ids, x, order, position, offsets, tile_expert, tile_start, tile_count, out, rows, experts, columns, slots,
    SIZE: tl.constexpr, IN_ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Every program ranks the rows, as `routing._rank`, and gathers a range of columns; they share the offsets."""
    after_previous(CHAINED)
    own = tl.arange(0, ROWS)
    live = own < rows
    expert = tl.load(ids + own, mask=live, other=2147483647).to(tl.int32)
    same = (expert[None, :] == expert[:, None]) & (own[None, :] < own[:, None])  # [row, row before it]
    earlier = (expert[None, :] < expert[:, None]) | same
    place = tl.sum(earlier.to(tl.int32), 1)
    heads = live & (expert >= 0) & (tl.sum(same.to(tl.int32), 1) % SIZE == 0)  # rows that begin a tile
    if tl.program_id(0) == 0:
        tl.store(order + place, own, mask=live)
        tl.store(position + own, place, mask=live)
        tile = tl.sum((earlier & heads[None, :]).to(tl.int32), 1)
        tl.store(tile_expert + tile, expert, mask=heads)
        tl.store(tile_start + tile, place, mask=heads)
        tl.store(tile_count, tl.sum(heads.to(tl.int32), 0))
    for first in range(tl.program_id(0) * 16, experts + 1, tl.num_programs(0) * 16):
        bound = first + tl.arange(0, 16)
        before = (expert[None, :] < bound[:, None]) & live[None, :]
        tl.store(offsets + bound, tl.sum(before.to(tl.int32), 1), mask=bound <= experts)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = live[:, None] & (column < columns)[None, :]
    values = tl.load(x + (own // slots)[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0)
    if IN_ORDER:
        values = in_fragment_order(values)
    tl.store(out + place[:, None].to(tl.int64) * columns + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gather(
    x, order, out, rows, columns, slots,
    IN_ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STORE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    after_previous(CHAINED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    slot = tl.load(order + row, mask=row < rows, other=0)
    values = tl.load(x + (slot // slots)[:, None].to(tl.int64) * columns + column[None, :], mask=live, other=0)
    if IN_ORDER:
        values = in_fragment_order(values)
    tl.store(out + row[:, None].to(tl.int64) * columns + column[None, :], values, mask=live, cache_modifier=STORE)


@triton.jit
def _combine(
    rows, position, weights, out, columns,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    after_previous(CHAINED)
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for slot in tl.static_range(SLOTS):  # unrolled, so that the loads of all slots are in flight together
        row = tl.load(position + token * SLOTS + slot).to(tl.int64)
        values = tl.load(rows + row * columns + column, mask=column < columns, other=0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * SLOTS + slot).to(tl.float32)
        total += values
    tl.store(out + token.to(tl.int64) * columns + column, total.to(out.dtype.element_ty), mask=column < columns)
