"""LoRA's projection and outer product of the same rows in one pass: a program walks an expert's rows with a slab of K.

It makes what `lora.project` and `lora.outer` make, from one read of x, and copies gathered rows on the way. A slab of
the matrix is loaded once and stays, where tiles load it again for every 64 rows; experts advance through the tokens
together, so that a token's other reads find it in L2. Sums over slabs are added in order. Left out: ranks above 32.

Shape letters: T tokens, k slots, R rows, E experts, K wide columns, r padded rank, P matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from orbit_kernels.fragments import in_fragment_order, settled
from orbit_kernels.lora import CHUNK, added_partials, narrow_tile, project
from orbit_kernels.routing import Routing, Tiles

LARGEST = 32  # rank
FEWEST, MANY = 8, 128
"""Rows of an expert in the mean: from the first on a program for each pays, above the second experts are crowded."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns of a slab, rows of a step, warps and pipeline stages."""

    width: int
    rows: int
    warps: int
    stages: int


# H200, Kimi-K2.6, rank 16: against `lora.project` and `lora.outer` one after the other at 16,384 tokens 0.57 to 0.34 ms
# for the slopes of gate and up, 1.27 to 0.95 ms for gathered slopes. Gathered rows come through registers, a step ahead
# by hand, since Triton's pipeline waits for their places.
FORWARD, GATHERED, PLAIN = Shape(CHUNK, 16, 4, 1), Shape(256, 32, 4, 1), Shape(512, 32, 4, 3)


def sweeps(routing: Routing, rank: int) -> bool:
    """Whether a slab of such a rank leaves room for the rows, and experts have enough of them."""
    return rank <= LARGEST and routing.rows >= FEWEST * routing.experts


def project_gathered(
    x: torch.Tensor,
    pair: list[torch.Tensor],
    scalings: list[float],
    routing: Routing,
    tiles: Tiles,
    *,
    out: torch.Tensor | None,
    in_order: bool,
) -> torch.Tensor:
    """`lora.project` of gathered rows, `pair` being of gate and up: by a sweep or by tiles, which give the same bits.

    Tiles read the matrices once for 64 rows, which is dear for float32 ones: few rows are swept then, for many
    the matrices are converted first.
    """
    crowded, exact = routing.rows > MANY * routing.experts, pair[0].dtype == x.dtype
    if not exact and not crowded and sweeps(routing, 2 * pair[0].shape[1]):
        return sweep(x, pair, scalings, routing, gather=True, out=out, in_order=in_order)[0]
    held = [matrix.to(x.dtype) for matrix in pair] if crowded else pair
    return project(x, held, scalings, routing, tiles, gather=True, out=out, in_order=in_order)


def sweep(
    x: torch.Tensor,
    matrices: list[torch.Tensor],
    scalings: list[float],
    routing: Routing,
    *,
    gather: bool = False,
    wide_parts: bool = False,
    transposed: bool = False,
    out: torch.Tensor | None = None,
    in_order: bool = False,
    low: torch.Tensor | None = None,
    shapes: list[torch.Size] | None = None,
    dtype: torch.dtype | None = None,
    weights: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(`lora.project(x, matrices, ...)`, `lora.outer(x, low, ...)` or [] without `low`), arguments as there.

    The outer product needs a single matrix, or `wide_parts`; `weights` [R] count for it alone. `shape` is for tuning.
    """
    parts = len(matrices)
    rank = matrices[0].shape[2 if transposed else 1]
    columns = x.shape[1] // (parts if wide_parts else 1)
    assert low is None or wide_parts or parts == 1
    slopes = [] if low is None else [x.new_empty(own, dtype=dtype) for own in shapes]
    shape = shape or (PLAIN if not gather else FORWARD if low is None else GATHERED)
    width = min(shape.width, max(32, triton.next_power_of_2(columns)))
    count = triton.cdiv(columns, width)
    partial = torch.empty(count, routing.rows, parts * rank, dtype=torch.float32, device=x.device)
    ranks = [own.shape[2] for own in slopes] or [0]
    _sweep[(routing.experts, count * (parts if wide_parts else 1))](
        x, matrices[0], matrices[-1], low, weights, out, partial, *([slopes[0], slopes[-1]] if slopes else [None] * 2),
        routing.order, routing.offsets, routing.rows, columns, x.shape[1],
        parts * rank if low is None else low.stride(0), ranks[0], ranks[-1],
        SLOTS=routing.position.shape[1], GATHER=gather, WIDE_PARTS=wide_parts, TRANSPOSED=transposed,
        WRITE=out is not None, IN_ORDER=in_order, OUTER=low is not None, WEIGHTED=weights is not None,
        PARTS=parts, RANK=rank, NARROW=rank if wide_parts else rank * parts, WIDTH=width, ROWS=shape.rows,
        ASM=x.dtype == torch.bfloat16, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return added_partials(partial, scalings, x.dtype), slopes


@triton.jit(do_not_specialize=["rows"])
def _sweep(
    x, matrix, matrix2, low, weights, rows_out, partial, slope, slope2, order, offsets, rows, columns, x_stride,
    low_stride, rank, rank2,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, WIDE_PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, WRITE: tl.constexpr,
    IN_ORDER: tl.constexpr, OUTER: tl.constexpr, WEIGHTED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    NARROW: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    slab = tl.program_id(1)
    part = 0
    own = matrix
    own_slope = slope
    own_rank = rank
    if WIDE_PARTS:
        part = slab % PARTS
        slab = slab // PARTS
        own = matrix if part == 0 else matrix2
        own_slope = slope if part == 0 else slope2
        own_rank = rank if part == 0 else rank2
    k = slab * WIDTH + tl.arange(0, WIDTH)
    column = k[None, :]
    r = tl.arange(0, NARROW)
    if NARROW == RANK:
        narrow = narrow_tile(own, expert, slab * WIDTH, columns, False, TRANSPOSED, RANK, WIDTH)
    else:
        where = (expert.to(tl.int64) * RANK + r % RANK)[:, None] * columns + column
        inside = column < columns
        held = tl.load(matrix + where, mask=inside & (r < RANK)[:, None], other=0)
        narrow = (held + tl.load(matrix2 + where, mask=inside & (r >= RANK)[:, None], other=0)).T
    narrow = narrow.to(x.dtype.element_ty)
    acc = tl.zeros((WIDTH, NARROW), tl.float32)
    index = begin + tl.arange(0, ROWS)
    x += part * columns
    if OUTER:
        low += part * RANK
    if GATHER:  # Where rows lie is asked for two steps ahead, the rows themselves one.
        source = tl.load(order + index, mask=index < end, other=0) // SLOTS
        next_wide = _rows(x, source, index, end, column, columns, x_stride)
        next_other = _factors(low, weights, index, end, r, low_stride, WEIGHTED) if OUTER else next_wide
        index += ROWS
        source = tl.load(order + index, mask=index < end, other=0) // SLOTS
    for first in range(begin, end, ROWS):
        index = first + tl.arange(0, ROWS)
        row = index[:, None]
        if GATHER:
            wide, other = next_wide, next_other
            next_wide = _rows(x, source, index + ROWS, end, column, columns, x_stride)
            next_other = _factors(low, weights, index + ROWS, end, r, low_stride, WEIGHTED) if OUTER else next_wide
            ahead = index + 2 * ROWS
            source = tl.load(order + ahead, mask=ahead < end, other=0) // SLOTS
        else:
            wide = _rows(x, index, index, end, column, columns, x_stride)
            other = _factors(low, weights, index, end, r, low_stride, WEIGHTED) if OUTER else wide
        if WRITE:
            kept = in_fragment_order(wide) if IN_ORDER else wide
            tl.store(rows_out + row.to(tl.int64) * columns + column, kept, mask=(row < end) & (column < columns))
        made = settled(tl.dot(wide, narrow, input_precision="ieee"), ASM)
        to = partial + (slab.to(tl.int64) * rows + row) * (PARTS * RANK) + part * RANK + r[None, :]
        tl.store(to, made, mask=row < end)
        if OUTER:
            acc = settled(tl.dot(wide.T, other.to(wide.dtype), acc, input_precision="ieee"), ASM)
    if OUTER:
        at = own_slope + expert.to(tl.int64) * columns * own_rank + k[:, None] * own_rank + r[None, :]
        tl.store(at, acc.to(slope.dtype.element_ty), mask=(k < columns)[:, None] & (r < own_rank)[None, :])


@triton.jit
def _rows(x, source, index, end, column, columns, stride):
    """[ROWS, WIDTH]: row source[i] of x for every index before `end`."""
    live = (index < end)[:, None] & (column < columns)
    return tl.load(x + source[:, None].to(tl.int64) * stride + column, mask=live, other=0)


@triton.jit
def _factors(low, weights, index, end, r, stride, WEIGHTED: tl.constexpr):
    """[ROWS, r]: low[index], times their weights."""
    live = index < end
    found = tl.load(low + index[:, None].to(tl.int64) * stride + r[None, :], mask=live[:, None], other=0)
    if WEIGHTED:
        weight = tl.load(weights + index, mask=live, other=0).to(tl.float32)
        found = (found.to(tl.float32) * weight[:, None]).to(found.dtype)
    return found
