"""Per-expert low-rank sums on rows sorted by expert (LoRA, 2106.09685), as products that both passes are made of.

forward   low = s x A^T;  y += low B^T
backward  dlow = s dy B;  dx += dlow A;  dA = dlow^T x;  dB = dy^T low
`project` makes low and dlow, of x and dy while they are gathered. `outer` sums wide^T narrow over an expert's rows. The
sums onto y and dx happen inside the grouped products (grouped.LowRank) or, where there is none to do it, in `expand`.

`project` splits the columns into chunks that programs sum in parallel, with a gathered chunk small enough for L2; the
chunks are added in order. Ranks are padded to 16, 32, 64 or 128 by `padded`.

Shape letters: T tokens, k slots, R rows, E experts, K wide columns, r padded rank, P adapters of the same rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from orbit_kernels.fragments import in_fragment_order, settled
from orbit_kernels.routing import Routing, Tiles

ROWS = 64
CHUNK = 512


def padded_rank(*ranks: int) -> int:
    """The rank that matrices of these are padded to; ValueError where the kernels have none."""
    if max(ranks) > 128:
        raise ValueError(f"LoRA of rank {max(ranks)} has no kernel; use at most 128, or path='reference'")
    return max(16, triton.next_power_of_2(max(ranks)))


def padded(matrix: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """The matrix with dimension `dim` of [E, r, K] or [E, N, r] padded with zeros to `rank`; of any dtype, as below."""
    spare = rank - matrix.shape[dim]
    return F.pad(matrix, (0, spare) if dim == 2 else (0, 0, 0, spare)) if spare else matrix.contiguous()


def project(
    x: torch.Tensor,
    matrices: list[torch.Tensor],
    scalings: list[float],
    routing: Routing,
    tiles: Tiles,
    *,
    gather: bool = False,
    wide_parts: bool = False,
    ordered: bool = False,
    transposed: bool = False,
    out: torch.Tensor | None = None,
    in_order: bool = False,
) -> torch.Tensor:
    """low [R, P r], part p = scalings[p] * x[row] A_p^T, for A_p [E, r, K], or [E, K, r] if `transposed`.

    x is [R, K], or [T, K] with `gather`, or [R, P K] with `wide_parts`, a part for each A_p; `ordered` if its columns
    are in `fragment_order`. `out` [R, K] receives the rows of x, `in_order` as `permute.gather_rows` does.
    """
    parts = len(matrices)
    rank = matrices[0].shape[2 if transposed else 1]
    columns = x.shape[1] // (parts if wide_parts else 1)
    if routing.rows == 0:
        return x.new_empty(0, parts * rank)
    chunk = CHUNK if gather else 2 * CHUNK  # as much of x as stays in L2, where experts share it
    count = triton.cdiv(columns, chunk)
    partial = torch.empty(count, routing.rows, parts * rank, dtype=torch.float32, device=x.device)
    _project[(tiles.expert.numel(), count * (parts if wide_parts else 1))](
        x, matrices[0], matrices[-1], out, partial, routing.order, tiles.expert, tiles.start, tiles.count,
        routing.offsets, routing.rows, columns, x.shape[1],
        SLOTS=routing.position.shape[1], GATHER=gather, WIDE_PARTS=wide_parts, ORDERED=ordered, TRANSPOSED=transposed,
        WRITE=out is not None, IN_ORDER=in_order, PARTS=parts, RANK=rank,
        STEP=min(128 if rank <= 64 else 64, max(32, triton.next_power_of_2(columns))), CHUNK=chunk, ROWS=tiles.size,
        ASM=x.dtype == torch.bfloat16, num_warps=4 if rank <= 32 else 8,
    )  # fmt: skip
    return added_partials(partial, scalings, x.dtype)


def added_partials(partial: torch.Tensor, scalings: list[float], dtype: torch.dtype) -> torch.Tensor:
    """low [R, P r]: the sum of partial [n, R, P r] over n, in order, times the scaling of each of the P parts."""
    count, rows, width = partial.shape
    low = partial.new_empty(rows, width, dtype=dtype)
    _add[(triton.cdiv(low.numel(), 1024),)](
        partial, low, rows, scalings[0], scalings[-1], COUNT=count, PARTS=len(scalings), WIDTH=width, SIZE=1024
    )
    return low


def expand(low: torch.Tensor, matrix: torch.Tensor, routing: Routing, out: torch.Tensor, tiles: Tiles) -> None:
    """out [R, N] += low[row] M_e with low [R, r], M [E, r, N] views; rows may be strided."""
    _, rank, columns = matrix.shape
    if routing.rows:
        width = min(128, triton.next_power_of_2(columns))
        _expand[(tiles.expert.numel(), triton.cdiv(columns, width))](
            low, matrix, out, tiles.expert, tiles.start, tiles.count, routing.offsets, columns, low.stride(0),
            out.stride(0), *matrix.stride(), RANK=rank, WIDTH=width, ROWS=ROWS,
        )  # fmt: skip


def outer(
    x: torch.Tensor,
    low: torch.Tensor,
    routing: Routing,
    shapes: list[torch.Size],
    dtype: torch.dtype,
    *,
    gather: bool = False,
    wide_parts: bool = False,
    transpose: bool = False,
    weights: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """For each p: the sum over an expert's rows of x[row]^T low_p[row], [E, K, r], or [E, r, K] if `transpose`.

    low_p are P = len(shapes) equal parts of low's columns; with `wide_parts` so are those of x. x is [R, K], or [T, K]
    with `gather`. low counts times `weights` [R]. Results have the given shapes, whose ranks may be smaller than the
    padded one, and the given dtype; zero without rows.
    """
    parts = len(shapes)
    rank = low.shape[1] // parts
    columns = x.shape[1] // (parts if wide_parts else 1)
    narrow = rank if wide_parts else rank * parts
    outs = [x.new_empty(shape, dtype=dtype) for shape in shapes]
    ranks = [shape[1 if transpose else 2] for shape in shapes]
    width = min(max(64, 8192 // narrow), 128 if gather else 256, max(64, triton.next_power_of_2(columns)))
    slabs = triton.cdiv(columns, width)
    _outer[(min(4, slabs), routing.experts, triton.cdiv(slabs, 4) * (parts if wide_parts else 1))](
        x, low, weights, outs[0], outs[-1], routing.order, routing.offsets, columns,
        ranks[0], ranks[-1], x.stride(0), low.stride(0),
        SLOTS=routing.position.shape[1], GATHER=gather, WIDE_PARTS=wide_parts, WEIGHTED=weights is not None,
        TRANSPOSE=transpose, NARROW=narrow, RANK=rank, WIDTH=width, ROWS=32,
        num_warps=4 if width * narrow <= 8192 else 8,
    )  # fmt: skip
    return outs


def project_reference(x: torch.Tensor, matrix: torch.Tensor, routing: Routing, gather: bool = False) -> torch.Tensor:
    """x[row] M_e for M [E, K, r] in PyTorch; `expand` and `outer` are its transposes, so autograd checks all three."""
    rows = x[routing.order.long() // routing.position.shape[1]] if gather else x
    counts = routing.offsets.diff().tolist()
    return torch.cat([own @ m.to(own.dtype) for own, m in zip(rows.split(counts), matrix, strict=True)])


@triton.jit(do_not_specialize=["rows"])
def _project(
    x, matrix, matrix2, rows_out, partial, order, tile_group, tile_start, tile_count, offsets, rows, columns,
    x_stride,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, WIDE_PARTS: tl.constexpr, ORDERED: tl.constexpr,
    TRANSPOSED: tl.constexpr, WRITE: tl.constexpr, IN_ORDER: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    STEP: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        group = tl.load(tile_group + tile)
        row = (tl.load(tile_start + tile) + tl.arange(0, ROWS))[:, None]
        end = tl.load(offsets + group + 1)
        source = tl.load(order + row, mask=row < end, other=0) // SLOTS if GATHER else row
        chunk = tl.program_id(1)
        part = 0
        own = matrix
        if WIDE_PARTS:
            part = chunk % PARTS
            chunk = chunk // PARTS
            own = matrix if part == 0 else matrix2
        acc = tl.zeros((ROWS, RANK), tl.float32)
        acc2 = tl.zeros((ROWS, RANK), tl.float32)
        for first in range(chunk * CHUNK, tl.minimum(columns, (chunk + 1) * CHUNK), STEP):
            column = first + tl.arange(0, STEP)[None, :]
            live = (row < end) & (column < columns)
            wide = tl.load(x + source.to(tl.int64) * x_stride + part * columns + column, mask=live, other=0)
            narrow = narrow_tile(own, group, first, columns, ORDERED, TRANSPOSED, RANK, STEP).to(wide.dtype)
            acc = settled(tl.dot(wide, narrow, acc, input_precision="ieee"), ASM)
            if PARTS == 2 and not WIDE_PARTS:
                narrow = narrow_tile(matrix2, group, first, columns, ORDERED, TRANSPOSED, RANK, STEP).to(wide.dtype)
                acc2 = settled(tl.dot(wide, narrow, acc2, input_precision="ieee"), ASM)
            if WRITE:
                kept = in_fragment_order(wide) if IN_ORDER else wide
                tl.store(rows_out + row.to(tl.int64) * columns + column, kept, mask=live)
        place = (chunk.to(tl.int64) * rows + row) * (PARTS * RANK) + part * RANK + tl.arange(0, RANK)[None, :]
        tl.store(partial + place, acc, mask=row < end)
        if PARTS == 2 and not WIDE_PARTS:
            tl.store(partial + place + RANK, acc2, mask=row < end)


@triton.jit
def narrow_tile(
    matrix, group, first, columns,
    ORDERED: tl.constexpr, TRANSPOSED: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """[STEP, RANK] of a group's matrix from column `first` on; with ORDERED in `fragment_order`."""
    k = first + tl.arange(0, STEP)
    r = tl.arange(0, RANK)
    own = matrix + group.to(tl.int64) * RANK * columns
    if TRANSPOSED:
        tile = tl.load(own + k[:, None] * RANK + r[None, :], mask=(k < columns)[:, None], other=0)
    else:
        held = tl.load(own + r[:, None] * columns + k[None, :], mask=(k < columns)[None, :], other=0)
        tile = (in_fragment_order(held) if ORDERED else held).T
    return tile


@triton.jit(do_not_specialize=["rows"])
def _add(
    partial, out, rows, scaling, scaling2,
    COUNT: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    size = rows * WIDTH
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.float32)
    for chunk in tl.static_range(COUNT):
        total += tl.load(partial + tl.cast(size, tl.int64) * chunk + index, mask=index < size, other=0)
    factor = tl.where(index % WIDTH < WIDTH // PARTS, scaling, scaling2)
    tl.store(out + index, (total * factor).to(out.dtype.element_ty), mask=index < size)


@triton.jit
def _expand(
    low, matrix, out, tile_expert, tile_start, tile_count, offsets, columns, low_stride, out_stride, m_expert, m_rank,
    m_column, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
        live = (row < tl.load(offsets + expert + 1))[:, None]
        r = tl.arange(0, RANK)
        n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        narrow = tl.load(low + row[:, None].to(tl.int64) * low_stride + r[None, :], mask=live, other=0)
        place = matrix + expert.to(tl.int64) * m_expert + r[:, None] * m_rank + n[None, :] * m_column
        own = tl.load(place, mask=(n < columns)[None, :], other=0)
        acc = tl.dot(narrow, own.to(narrow.dtype), input_precision="ieee")
        place = out + row[:, None].to(tl.int64) * out_stride + n[None, :]
        live = live & (n < columns)[None, :]
        before = tl.load(place, mask=live, other=0).to(tl.float32)
        tl.store(place, (before + acc).to(out.dtype.element_ty), mask=live)


@triton.jit
def _outer(
    x, low, weights, out, out2, order, offsets, columns, rank, rank2, x_stride, low_stride,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, WIDE_PARTS: tl.constexpr, WEIGHTED: tl.constexpr,
    TRANSPOSE: tl.constexpr, NARROW: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.load(offsets + expert + 1)
    part = 0
    slab = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if WIDE_PARTS:
        half = tl.num_programs(2) // 2
        part = tl.program_id(2) // half
        slab -= part * half * tl.num_programs(0)
    k = slab * WIDTH + tl.arange(0, WIDTH)
    r = tl.arange(0, NARROW)
    acc = tl.zeros((WIDTH, NARROW), tl.float32)
    begin = tl.load(offsets + expert)
    index = begin + tl.arange(0, ROWS)
    source = tl.load(order + index, mask=index < end, other=0) // SLOTS if GATHER else index
    for first in range(begin, end, ROWS):
        index = first + tl.arange(0, ROWS)
        row = index[:, None]
        live = (row < end) & (k < columns)[None, :]
        wide = tl.load(x + source[:, None].to(tl.int64) * x_stride + part * columns + k[None, :], mask=live, other=0)
        source = index + ROWS  # the next step's, asked for a step ahead: the copy of rows waits for the answer
        if GATHER:
            source = tl.load(order + source, mask=source < end, other=0) // SLOTS
        narrow = tl.load(low + row.to(tl.int64) * low_stride + part * RANK + r[None, :], mask=row < end, other=0)
        if WEIGHTED:
            weight = tl.load(weights + row, mask=row < end, other=0).to(tl.float32)
            narrow = (narrow.to(tl.float32) * weight).to(narrow.dtype)
        acc = tl.dot(wide.T, narrow.to(wide.dtype), acc, input_precision="ieee")
    first_part = (r < RANK) & (part == 0)
    own_rank = tl.where(first_part, rank, rank2)[None, :]
    inside = (r % RANK)[None, :]
    place = inside * columns + k[:, None] if TRANSPOSE else k[:, None] * own_rank + inside
    place += expert.to(tl.int64) * columns * own_rank
    kept = (k < columns)[:, None] & (inside < own_rank)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=kept & first_part[None, :])
    if (NARROW > RANK) | WIDE_PARTS:
        tl.store(out2 + place, acc.to(out2.dtype.element_ty), mask=kept & (first_part[None, :] == 0))
