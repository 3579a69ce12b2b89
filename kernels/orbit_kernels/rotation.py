"""Per-expert block-diagonal rotations of rows sorted by expert (OFT, 2306.07280), with gradients for rows and blocks.

y[r] = x[r] blockdiag(R_e) for the expert e of row r. The forward can take x in token order (it gathers while it reads)
and can write the column order that a 4-bit product reads: it permutes the columns of R instead, for nothing.
Rotations of linears that all tokens share are a batched matrix product, which PyTorch does well.

Shape letters: R rows, E experts, K columns, b block size, n = K / b blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orbit_kernels.experts import rotate_blocks
from orbit_kernels.fragments import fragment_order
from orbit_kernels.routing import Routing, Tiles, row_tiles

ROWS = 64


def rotate_rows(
    x: torch.Tensor,
    rotations: list[torch.Tensor],
    routing: Routing,
    *,
    gather: bool = False,
    in_order: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """y [P, R, K] for P = 1 or 2 rotations [E, n, b, b] of the same rows: x [R, K], or [T, K] with `gather`.

    `in_order` as in `permute.gather_rows`. Blocks smaller than 32 are joined to blocks of 32 first.
    """
    tiles = tiles or row_tiles(routing.offsets, routing.rows, ROWS)
    wide = [_at_least_32(rotation) for rotation in rotations]
    blocks, b = wide[0].shape[1], wide[0].shape[-1]
    out = x.new_empty(len(wide), routing.rows, blocks * b)
    if routing.rows:
        _rotate[(tiles.expert.numel(), triton.cdiv(blocks, _per_program(b)))](
            x, wide[0], wide[-1], out, routing.order, routing.position.shape[1], routing.rows,
            tiles.expert, tiles.start, tiles.count, routing.offsets, blocks,
            GATHER=gather, IN_ORDER=in_order, TWO=len(wide) == 2, B=b, PER=_per_program(b), ROWS=ROWS,
        )  # fmt: skip
    return out


def rotate_back(
    x: torch.Tensor, dy: torch.Tensor, rotations: list[torch.Tensor], routing: Routing, gather: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(dx [R, K], dR like each rotation) of `rotate_rows` for dy [P, R, K], in one pass over the rows.

    dx is the sum over P before its rounding; dR sums over an expert's rows and is zero for experts without any.
    """
    wide = [_at_least_32(rotation) for rotation in rotations]
    experts, blocks, b, _ = wide[0].shape
    out = dy.new_empty(dy.shape[1:])
    slopes = [torch.empty_like(rotation) for rotation in wide]
    small = routing.rows < 48 * experts  # half-empty tiles otherwise
    _back[(triton.cdiv(blocks, _per_program(b)), experts)](
        x, dy, wide[0], wide[-1], out, slopes[0], slopes[-1], routing.order, routing.position.shape[1], routing.rows,
        routing.offsets, blocks,
        GATHER=gather, TWO=len(wide) == 2, B=b, PER=_per_program(b), ROWS=32 if small else ROWS,
    )  # fmt: skip
    return out, [_narrow(slope, rotation) for slope, rotation in zip(slopes, rotations, strict=True)]


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


def _at_least_32(rotation: torch.Tensor) -> torch.Tensor:
    """[E, n, b, b] with b >= 32: smaller blocks become the diagonal of larger ones."""
    experts, blocks, b, _ = rotation.shape
    if b >= 32:
        return rotation.contiguous()
    count = 32 // b
    wide = rotation.new_zeros(experts, blocks // count, count, b, count, b)
    wide.diagonal(dim1=2, dim2=4).copy_(rotation.view(experts, blocks // count, count, b, b).movedim(2, -1))
    return wide.view(experts, blocks // count, 32, 32)


def _narrow(slope: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The part of a joined block's gradient that belongs to the blocks on its diagonal."""
    b = rotation.shape[-1]
    if b >= 32:
        return slope
    split = slope.view(slope.shape[0], slope.shape[1], 32 // b, b, 32 // b, b)
    return split.diagonal(dim1=2, dim2=4).movedim(-1, 2).reshape(rotation.shape)


def _per_program(b: int) -> int:
    """Blocks of one program: 128 columns a row keep the copy in whole lines."""
    return max(1, 128 // b)


@triton.jit
def _rotate(
    x, rotation, rotation2, out, order, slots, rows, tile_expert, tile_start, tile_count, offsets, blocks,
    GATHER: tl.constexpr, IN_ORDER: tl.constexpr, TWO: tl.constexpr, B: tl.constexpr, PER: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_count):
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_start + tile) + tl.arange(0, ROWS)
        live = (row < tl.load(offsets + expert + 1))[:, None]
        source = tl.load(order + row, mask=row < tl.load(offsets + expert + 1), other=0) // slots if GATHER else row
        inside = tl.arange(0, B)
        if IN_ORDER:  # position s of a 32-group holds column 8 (s % 8 // 2) + s // 8 + 4 (s % 2)
            slot = inside % 32
            right = inside - slot + 8 * (slot % 8 // 2) + slot // 8 + 4 * (slot % 2)
        else:
            right = inside
        for index in range(PER):
            block = tl.program_id(1) * PER + index
            if block < blocks:
                where = (expert.to(tl.int64) * blocks + block) * B * B + inside[:, None] * B + right[None, :]
                columns = block * B + inside[None, :]
                own = tl.load(x + source[:, None].to(tl.int64) * (blocks * B) + columns, mask=live, other=0)
                y = tl.dot(own, tl.load(rotation + where).to(own.dtype), input_precision="ieee")
                place = out + row[:, None].to(tl.int64) * (blocks * B) + columns
                tl.store(place, y.to(out.dtype.element_ty), mask=live)
                if TWO:
                    y = tl.dot(own, tl.load(rotation2 + where).to(own.dtype), input_precision="ieee")
                    place = out + (rows + row[:, None].to(tl.int64)) * (blocks * B) + columns
                    tl.store(place, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _back(
    x, dy, rotation, rotation2, out, slope, slope2, order, slots, rows, offsets, blocks,
    GATHER: tl.constexpr, TWO: tl.constexpr, B: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.load(offsets + expert + 1)
    inside = tl.arange(0, B)
    for index in range(PER):
        block = tl.program_id(0) * PER + index
        if block < blocks:
            columns = block * B + inside[None, :]
            where = (expert.to(tl.int64) * blocks + block) * B * B + inside[:, None] * B + inside[None, :]
            turn = tl.load(rotation + where).T
            turn2 = tl.load(rotation2 + where).T
            acc = tl.zeros((B, B), tl.float32)
            acc2 = tl.zeros((B, B), tl.float32)
            for first in range(tl.load(offsets + expert), end, ROWS):
                row = first + tl.arange(0, ROWS)
                live = (row < end)[:, None]
                source = tl.load(order + row, mask=row < end, other=0) // slots if GATHER else row
                own = tl.load(x + source[:, None].to(tl.int64) * (blocks * B) + columns, mask=live, other=0)
                place = row[:, None].to(tl.int64) * (blocks * B) + columns
                d = tl.load(dy + place, mask=live, other=0)
                acc = tl.dot(own.T, d, acc, input_precision="ieee")
                dx = tl.dot(d, turn.to(d.dtype), input_precision="ieee")
                if TWO:
                    second = (rows + row[:, None].to(tl.int64)) * (blocks * B) + columns
                    d = tl.load(dy + second, mask=live, other=0)
                    acc2 = tl.dot(own.T, d, acc2, input_precision="ieee")
                    dx = tl.dot(d, turn2.to(d.dtype), dx, input_precision="ieee")
                tl.store(out + place, dx.to(out.dtype.element_ty), mask=live)
            tl.store(slope + where, acc.to(slope.dtype.element_ty))
            if TWO:
                tl.store(slope2 + where, acc2.to(slope2.dtype.element_ty))
