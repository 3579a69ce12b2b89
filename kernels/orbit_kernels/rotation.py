"""Per-expert block-diagonal rotations of rows sorted by expert (OFT, 2306.07280), with gradients for rows and blocks.

y[r] = x[r] blockdiag(R_e) for the expert e of row r. The forward can take x in token order (it gathers while it reads)
and can write the column order that a 4-bit product reads: it permutes the columns of R instead, for nothing. Of the
down projection both passes compute SwiGLU on the way: they read h, and the gradient comes out as that of h.
A slab of columns is multiplied as one matrix with zeros outside the blocks: the matrix unit has room, the memory not.
Rotations of linears that all tokens share are a batched matrix product, which PyTorch does well.

Shape letters: T tokens, k slots, R rows, E experts, K columns, b block size, n = K / b blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orbit_kernels.experts import rotate_blocks
from orbit_kernels.fragments import beside, fragment_order, in_fragment_order, settled
from orbit_kernels.permute import store_modifier
from orbit_kernels.routing import Routing, Tiles
from orbit_kernels.swiglu import activation, activation_slopes, load_hidden, store_hidden


def rotate_rows(
    x: torch.Tensor,
    rotations: list[torch.Tensor],
    routing: Routing,
    tiles: Tiles,
    *,
    gather: bool = False,
    in_order: bool = False,
) -> torch.Tensor:
    """y [P, R, K] for P = 1 or 2 rotations [E, n, b, b] of the same rows: x [R, K], or [T, K] with `gather`.

    `in_order` as in `permute.gather_rows`; tiles of 64 rows. Raises ValueError for blocks that are no power of two or
    above 128.
    """
    return _rotated(x, rotations, routing, tiles, gather, in_order, False, None)


def rotate_hidden(
    h: torch.Tensor,
    rotation: torch.Tensor,
    routing: Routing,
    tiles: Tiles,
    limit: float | None = None,
    in_order: bool = False,
) -> torch.Tensor:
    """`rotate_rows` [R, K] of a = swiglu(h), h [R, 2 K]."""
    return _rotated(h, [rotation], routing, tiles, False, in_order, True, limit)[0]


def rotate_back(
    x: torch.Tensor,
    dy: torch.Tensor,
    rotations: list[torch.Tensor],
    routing: Routing,
    gather: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(dx [R, K], dR like each rotation) of `rotate_rows` for dy [P, R, K], in one pass over the rows.

    dx is the sum over P before its rounding; dR sums over an expert's rows and is zero for experts without any. It has
    `dtype`, or that of the rotations.
    """
    return _turned_back(x, dy, rotations, routing, gather, False, None, None, None, dtype)


def rotate_hidden_back(
    h: torch.Tensor,
    dy: torch.Tensor,
    rotation: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    limit: float | None = None,
    dots: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh [R, 2 K], dR) of `rotate_hidden` for weights[row] * dy, with dy [R, K] and weights [R].

    `dots` float32 [n, R], n as `slabs`, receives the addends of <a, da> of each row (see `swiglu.swiglu_gradient`).
    """
    dh, (slope,) = _turned_back(h, dy.unsqueeze(0), [rotation], routing, False, True, weights, limit, dots, dtype)
    return dh, slope


def slabs(columns: int, block: int) -> int:
    """Addends of `rotate_hidden_back`'s dots."""
    return triton.cdiv(columns, max(32, block))


def rotate_rows_reference(
    x: torch.Tensor, rotations: list[torch.Tensor], routing: Routing, gather: bool = False, in_order: bool = False
) -> torch.Tensor:
    """`rotate_rows` in PyTorch; autograd through it is the reference of `rotate_back`."""
    rows = x[routing.order.long() // routing.position.shape[1]] if gather else x
    counts = routing.offsets.diff().tolist()
    y = torch.stack(
        [
            torch.cat([rotate_blocks(own, blocks) for own, blocks in zip(rows.split(counts), rotation, strict=True)])
            for rotation in rotations
        ]
    )
    return y[..., fragment_order(y.shape[-1], y.device)] if in_order else y


# Shapes below: H200, Kimi-K2.6's experts, block 32, at means of 21 to 1365 rows an expert. A program takes SPAN columns
# of a tile, or a group of slabs run together: they share pages of memory, and what is gathered stays in L2.


def _sizes(rotations: list[torch.Tensor]) -> tuple[int, int]:
    """(K, b); ValueError for blocks that no slab holds, and for gate and up with blocks of two sizes."""
    blocks, b = rotations[0].shape[1], rotations[0].shape[-1]
    if b > 128 or b & (b - 1):
        raise ValueError(
            f"rotations of blocks of {b} have no kernel; use a power of two up to 128, or path='reference'"
        )
    if rotations[0].shape != rotations[-1].shape:
        raise ValueError(
            f"rotations of gate and up have blocks of {b} and of {rotations[-1].shape[-1]}, and one kernel multiplies "
            "both; give them blocks of one size, or pass path='reference'"
        )
    return blocks * b, b


def _crowded(routing: Routing) -> bool:
    """Whether experts have so many rows that larger tiles and deeper pipelines pay; no bit depends on it."""
    return routing.rows > 128 * routing.experts


def _rotated(x, rotations, routing, tiles, gather, in_order, hidden, limit) -> torch.Tensor:
    columns, b = _sizes(rotations)
    out = x.new_empty(len(rotations), routing.rows, columns)
    if routing.rows:
        width, span, stages = max(64, b), 512, 3 if b <= 64 else 2
        pair = [rotations[0].contiguous(), rotations[-1].contiguous()]
        if b <= 32 and not _crowded(routing):
            width, span, stages = (32, 512, 3) if hidden else (32, 256, 4)
        else:  # every tile loads its expert's rotations: float32 ones would fill the shared memory
            pair = [rotation.to(x.dtype) for rotation in pair]
        if b <= 64 and _crowded(routing) and not hidden:
            tiles = routing.tiles(128)
        _rotate[(tiles.expert.numel(), triton.cdiv(columns, span))](
            x, *pair, out, routing.order, routing.rows, tiles.expert, tiles.start, tiles.count, routing.offsets,
            columns, limit or 0.0,
            SLOTS=routing.position.shape[1], GATHER=gather, HIDDEN=hidden, CLAMPED=limit is not None,
            IN_ORDER=in_order, TWO=len(rotations) == 2, B=b, WIDTH=width, SPAN=span, ROWS=tiles.size,
            STORE=store_modifier(out) if gather else "", num_warps=4, num_stages=stages,
        )  # fmt: skip
    return out


def _turned_back(x, dy, rotations, routing, gather, hidden, weights, limit, dots, dtype):
    columns, b = _sizes(rotations)
    out = torch.empty_like(x) if hidden else dy.new_empty(dy.shape[1:])
    slopes = [rotation.new_empty(rotation.shape, dtype=dtype or rotation.dtype) for rotation in rotations]
    pair = [rotation.contiguous() for rotation in (rotations[0], rotations[-1])]
    width, rows, warps, stages, group = 64, 64, 4, 3 if _crowded(routing) else 2, 2
    if b == 128:
        width, rows, warps, stages, group = 128, 16, 8, 3, 2
    elif b <= 32 and (hidden or not _crowded(routing)):
        width, rows, warps, stages, group = 32, 32, 2, 3 if hidden else 2, 4
    elif hidden:
        rows, stages, group = 32, 3, 4
    _back[(group, routing.experts, triton.cdiv(triton.cdiv(columns, width), group))](
        x, dy, *pair, out, slopes[0], slopes[-1], routing.order, routing.rows, routing.offsets, weights, dots,
        columns, limit or 0.0,
        SLOTS=routing.position.shape[1], GATHER=gather, HIDDEN=hidden, CLAMPED=limit is not None,
        DOTS=dots is not None, TWO=len(rotations) == 2, B=b, WIDTH=width, ROWS=rows,
        ASM=x.dtype == torch.bfloat16, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, slopes


@triton.jit
def _places(expert, first, columns, B: tl.constexpr, WIDTH: tl.constexpr):
    """(offsets [WIDTH, WIDTH] into rotations of a slab from column `first` on, which of them lie in a block)."""
    left = tl.arange(0, WIDTH)
    right = tl.arange(0, WIDTH)
    where = (expert.to(tl.int64) * columns + first + left)[:, None] * B + (right % B)[None, :]
    return where, ((left // B)[:, None] == (right // B)[None, :]) & (first + left < columns)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x, rotation, rotation2, out, order, rows, tile_expert, tile_start, tile_count, offsets, columns, limit,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, HIDDEN: tl.constexpr, CLAMPED: tl.constexpr, IN_ORDER: tl.constexpr,
    TWO: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile)
        row = (tl.load(tile_start + tile) + tl.arange(0, ROWS))[:, None]
        end = tl.load(offsets + expert + 1)
        source = tl.load(order + row, mask=row < end, other=0) // SLOTS if GATHER else row
        start = tl.program_id(1) * SPAN
        for first in range(start, tl.minimum(columns, start + SPAN), WIDTH):
            column = first + tl.arange(0, WIDTH)[None, :]
            live = (row < end) & (column < columns)
            if HIDDEN:
                gate, up = load_hidden(x, row, column, columns, live)
                own = activation(gate, up, limit, CLAMPED).to(x.dtype.element_ty)
            else:
                own = tl.load(x + source.to(tl.int64) * columns + column, mask=live, other=0)
            where, known = _places(expert, first, columns, B, WIDTH)
            turn = tl.load(rotation + where, mask=known, other=0).to(own.dtype)
            y = tl.dot(own, turn, input_precision="ieee").to(out.dtype.element_ty)
            place = row.to(tl.int64) * columns + column
            tl.store(out + place, in_fragment_order(y) if IN_ORDER else y, mask=live, cache_modifier=STORE)
            if TWO:
                turn = tl.load(rotation2 + where, mask=known, other=0).to(own.dtype)
                y = tl.dot(own, turn, input_precision="ieee").to(out.dtype.element_ty)
                place = (rows + row.to(tl.int64)) * columns + column
                tl.store(out + place, in_fragment_order(y) if IN_ORDER else y, mask=live, cache_modifier=STORE)


@triton.jit(do_not_specialize=["rows"])
def _back(
    x, dy, rotation, rotation2, out, slope, slope2, order, rows, offsets, weights, dots, columns, limit,
    SLOTS: tl.constexpr, GATHER: tl.constexpr, HIDDEN: tl.constexpr, CLAMPED: tl.constexpr, DOTS: tl.constexpr,
    TWO: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    number = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    slab = number * WIDTH
    if slab < columns:
        where, known = _places(expert, slab, columns, B, WIDTH)
        turn = tl.load(rotation + where, mask=known, other=0).to(dy.dtype.element_ty).T
        turn2 = tl.load(rotation2 + where, mask=known, other=0).to(dy.dtype.element_ty).T if TWO else turn
        acc = tl.zeros((WIDTH, WIDTH), tl.float32)
        acc2 = tl.zeros((WIDTH, WIDTH), tl.float32)
        column = slab + tl.arange(0, WIDTH)[None, :]
        index = begin + tl.arange(0, ROWS)
        source = tl.load(order + index, mask=index < end, other=0) // SLOTS if GATHER else index
        for first in range(begin, end, ROWS):
            index = first + tl.arange(0, ROWS)
            row = index[:, None]
            live = (row < end) & (column < columns)
            place = row.to(tl.int64) * columns + column
            d = tl.load(dy + place, mask=live, other=0)
            dx = tl.dot(d, turn, input_precision="ieee")
            if HIDDEN:
                gate, up = load_hidden(x, row, column, columns, live)
                gate, up = beside(gate, dx, ASM), beside(up, dx, ASM)
                a = activation(gate, up, limit, CLAMPED)
                if DOTS:
                    to = dots + number.to(tl.int64) * rows + index
                    tl.store(to, tl.sum(a * dx, 1), mask=index < end)
                weight = tl.load(weights + row, mask=row < end, other=0).to(tl.float32)
                own = (a * weight).to(dy.dtype.element_ty)
                d_gate, d_up = activation_slopes(gate, up, dx * weight, limit, CLAMPED)
                store_hidden(out, row, column, columns, live, d_gate, d_up)
            else:
                own = tl.load(x + source[:, None].to(tl.int64) * columns + column, mask=live, other=0)
                # Where the next step's rows lie is asked for a step ahead: the copy of rows waits for the answer.
                source = index + ROWS
                if GATHER:
                    source = tl.load(order + source, mask=source < end, other=0) // SLOTS
            acc = settled(tl.dot(own.T, d, acc, input_precision="ieee"), ASM and (B > 64 or not TWO))
            if TWO:
                d = tl.load(dy + (rows + row.to(tl.int64)) * columns + column, mask=live, other=0)
                acc2 = settled(tl.dot(own.T, d, acc2, input_precision="ieee"), ASM and B > 64)
                dx = tl.dot(d, turn2, dx, input_precision="ieee")
            if not HIDDEN:
                tl.store(out + place, dx.to(out.dtype.element_ty), mask=live)
        tl.store(slope + where, acc.to(slope.dtype.element_ty), mask=known)
        if TWO:
            tl.store(slope2 + where, acc2.to(slope2.dtype.element_ty), mask=known)
