"""Per-expert low-rank sums on rows sorted by expert (LoRA, 2106.09685), as three products that all passes are made of.

forward   low = x A^T;  y += s low B^T
backward  dlow = s dy B;  dx += dlow A;  dA = dlow^T x;  dB = s dy^T low
so `project` [R, K] -> [R, r], `expand` [R, r] -> += [R, N], and `outer` sums x^T low over an expert's rows. Each reads
or writes the wide matrix once. Matrices are given as views: nothing is transposed in memory.

Shape letters: R rows, E experts, K wide columns, r rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orbit_kernels.routing import Routing, Tiles, row_tiles

ROWS = 64


def project(
    x: torch.Tensor,
    matrix: torch.Tensor,
    routing: Routing,
    gather: bool = False,
    scaling: float = 1.0,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """low [R, r] = scaling * x[row] M_e, M [E, K, r] a view; x [R, K] (strided rows) or [T, K] with `gather`."""
    tiles = tiles or row_tiles(routing.offsets, routing.rows, ROWS)
    experts, columns, rank = matrix.shape
    out = x.new_empty(routing.rows, rank)
    if routing.rows:
        _project[(tiles.expert.numel(),)](
            x, matrix, out, routing.order, routing.position.shape[1], tiles.expert, tiles.start, tiles.count,
            routing.offsets, columns, rank, x.stride(0), *matrix.stride(), scaling,
            GATHER=gather, RANK=_padded(rank), STEP=min(128, triton.next_power_of_2(columns)), ROWS=ROWS,
        )  # fmt: skip
    return out


def expand(
    low: torch.Tensor,
    matrix: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    scaling: float = 1.0,
    tiles: Tiles | None = None,
) -> None:
    """out [R, N] += scaling * low[row] M_e with low [R, r], M [E, r, N] views; rows may be strided."""
    tiles = tiles or row_tiles(routing.offsets, routing.rows, ROWS)
    experts, rank, columns = matrix.shape
    if routing.rows:
        width = min(128, triton.next_power_of_2(columns))
        _expand[(tiles.expert.numel(), triton.cdiv(columns, width))](
            low, matrix, out, tiles.expert, tiles.start, tiles.count, routing.offsets, columns, rank, low.stride(0),
            out.stride(0), *matrix.stride(), scaling, RANK=_padded(rank), WIDTH=width, ROWS=ROWS,
        )  # fmt: skip


def outer(
    x: torch.Tensor,
    low: torch.Tensor,
    routing: Routing,
    dtype: torch.dtype,
    gather: bool = False,
    scaling: float = 1.0,
    transpose: bool = False,
) -> torch.Tensor:
    """[E, K, r] in `dtype`: scaling times the sum over an expert's rows of x[row]^T low[row]; zero without rows.

    With `transpose` the same as [E, r, K].
    """
    columns, rank = x.shape[1], low.shape[1]
    shape = (routing.experts, rank, columns) if transpose else (routing.experts, columns, rank)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    strides = (1, columns) if transpose else (rank, 1)
    width = min(128, triton.next_power_of_2(columns))
    _outer[(triton.cdiv(columns, width), routing.experts)](
        x, low, out, routing.order, routing.position.shape[1], routing.offsets, columns, rank, x.stride(0),
        low.stride(0), *strides, scaling, GATHER=gather, RANK=_padded(rank), WIDTH=width, ROWS=ROWS,
    )  # fmt: skip
    return out


def project_reference(x: torch.Tensor, matrix: torch.Tensor, routing: Routing, gather: bool = False) -> torch.Tensor:
    """`project` in PyTorch; `expand` and `outer` are its transposes, so autograd through it checks all three."""
    rows = x[routing.order.long() // routing.position.shape[1]] if gather else x
    counts = routing.offsets.diff().tolist()
    return torch.cat([own @ m.to(own.dtype) for own, m in zip(rows.split(counts), matrix, strict=True)])


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


@triton.jit
def _project(
    x, matrix, out, order, slots, tile_expert, tile_start, tile_count, offsets, columns, rank, x_stride, m_expert,
    m_column, m_rank, scaling, GATHER: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
        live = row < tl.load(offsets + expert + 1)
        source = tl.load(order + row, mask=live, other=0) // slots if GATHER else row
        r = tl.arange(0, RANK)
        own = matrix + expert.to(tl.int64) * m_expert + r[None, :] * m_rank
        acc = tl.zeros((ROWS, RANK), tl.float32)
        for first in range(0, columns, STEP):
            k = first + tl.arange(0, STEP)
            place = x + source[:, None].to(tl.int64) * x_stride + k[None, :]
            wide = tl.load(place, mask=live[:, None] & (k < columns)[None, :], other=0)
            narrow = tl.load(own + k[:, None] * m_column, mask=(k < columns)[:, None] & (r < rank)[None, :], other=0)
            acc = tl.dot(wide, narrow.to(wide.dtype), acc, input_precision="ieee")
        place = out + row[:, None].to(tl.int64) * rank + r[None, :]
        tl.store(place, (acc * scaling).to(out.dtype.element_ty), mask=live[:, None] & (r < rank)[None, :])


@triton.jit
def _expand(
    low, matrix, out, tile_expert, tile_start, tile_count, offsets, columns, rank, low_stride, out_stride, m_expert,
    m_rank, m_column, scaling, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
        live = (row < tl.load(offsets + expert + 1))[:, None]
        r = tl.arange(0, RANK)
        n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        place = low + row[:, None].to(tl.int64) * low_stride + r[None, :]
        narrow = tl.load(place, mask=live & (r < rank)[None, :], other=0)
        place = matrix + expert.to(tl.int64) * m_expert + r[:, None] * m_rank + n[None, :] * m_column
        own = tl.load(place, mask=(r < rank)[:, None] & (n < columns)[None, :], other=0)
        acc = tl.dot(narrow, own.to(narrow.dtype), input_precision="ieee") * scaling
        place = out + row[:, None].to(tl.int64) * out_stride + n[None, :]
        live = live & (n < columns)[None, :]
        before = tl.load(place, mask=live, other=0).to(tl.float32)
        tl.store(place, (before + acc).to(out.dtype.element_ty), mask=live)


@triton.jit
def _outer(
    x, low, out, order, slots, offsets, columns, rank, x_stride, low_stride, o_column, o_rank, scaling,
    GATHER: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.load(offsets + expert + 1)
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    r = tl.arange(0, RANK)
    acc = tl.zeros((WIDTH, RANK), tl.float32)
    for first in range(tl.load(offsets + expert), end, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < end)[:, None]
        source = tl.load(order + row, mask=row < end, other=0) // slots if GATHER else row
        place = x + source[:, None].to(tl.int64) * x_stride + k[None, :]
        wide = tl.load(place, mask=live & (k < columns)[None, :], other=0)
        place = low + row[:, None].to(tl.int64) * low_stride + r[None, :]
        narrow = tl.load(place, mask=live & (r < rank)[None, :], other=0)
        acc = tl.dot(wide.T, narrow, acc, input_precision="ieee")
    place = out + expert.to(tl.int64) * columns * rank + k[:, None] * o_column + r[None, :] * o_rank
    tl.store(place, (acc * scaling).to(out.dtype.element_ty), mask=(k < columns)[:, None] & (r < rank)[None, :])
