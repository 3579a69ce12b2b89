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
from orbit_kernels.routing import Routing


def rotate_rows(
    x: torch.Tensor,
    rotations: list[torch.Tensor],
    routing: Routing,
    *,
    gather: bool = False,
    in_order: bool = False,
) -> torch.Tensor:
    """y [P, R, K] for P = 1 or 2 rotations [E, n, b, b] of the same rows: x [R, K], or [T, K] with `gather`.

    `in_order` as in `permute.gather_rows`. Blocks smaller than 32 are joined to blocks of 32 first.
    """
    wide = [_at_least_32(rotation) for rotation in rotations]
    blocks, b = wide[0].shape[1], wide[0].shape[-1]
    out = x.new_empty(len(wide), routing.rows, blocks * b)
    if routing.rows:
        _rotate[(triton.cdiv(blocks, _per_program(b)), routing.experts)](
            x, wide[0], wide[-1], out, routing.order, routing.position.shape[1], routing.rows, routing.offsets, blocks,
            GATHER=gather, IN_ORDER=in_order, TWO=len(wide) == 2, B=b, PER=_per_program(b), ROWS=_rows(routing),
        )  # fmt: skip
    return out


def rotate_back(
    x: torch.Tensor, dy: torch.Tensor, rotations: list[torch.Tensor], routing: Routing, gather: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(dx [R, K], dR like each rotation) of `rotate_rows` for dy [P, R, K], in one pass over the rows.

    dx is the sum over P before its rounding; dR sums over an expert's rows and is zero for experts without any.
    """
    wide = [_at_least_32(rotation) for rotation in rotations]
    blocks, b = wide[0].shape[1], wide[0].shape[-1]
    out = dy.new_empty(dy.shape[1:])
    slopes = [torch.empty_like(rotation) for rotation in wide]
    _back[(triton.cdiv(blocks, _per_program(b)), routing.experts)](
        x, dy, wide[0], wide[-1], out, slopes[0], slopes[-1], routing.order, routing.position.shape[1], routing.rows,
        routing.offsets, blocks,
        GATHER=gather, TWO=len(wide) == 2, B=b, PER=_per_program(b), ROWS=32,
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


def _rows(routing: Routing) -> int:
    """Rows of a step: a program walks all rows of its expert, and half-empty steps would cost as much as full ones."""
    return 64 if routing.rows > 48 * routing.experts else 32


@triton.jit
def _rotate(
    x, rotation, rotation2, out, order, slots, rows, offsets, blocks,
    GATHER: tl.constexpr, IN_ORDER: tl.constexpr, TWO: tl.constexpr, B: tl.constexpr, PER: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.load(offsets + expert + 1)
    width = blocks * B
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    inside = tl.arange(0, B)
    right = inside
    if IN_ORDER:  # position s of a 32-group holds column 8 (s % 8 // 2) + s // 8 + 4 (s % 2)
        slot = inside % 32
        right = inside - slot + 8 * (slot % 8 // 2) + slot // 8 + 4 * (slot % 2)
    where = (expert.to(tl.int64) * blocks + block)[:, None, None] * B * B + inside[None, :, None] * B
    where += right[None, None, :]
    known = (block < blocks)[:, None, None]
    turn = tl.load(rotation + where, mask=known, other=0).to(x.dtype.element_ty)  # [PER, B, B]
    turn2 = tl.load(rotation2 + where, mask=known, other=0).to(x.dtype.element_ty)
    column = tl.program_id(0) * (PER * B) + tl.arange(0, PER * B)[None, :]
    for first in range(tl.load(offsets + expert), end, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        live = (row < end) & (column < width)
        source = tl.load(order + row, mask=row < end, other=0) // slots if GATHER else row
        own = tl.load(x + source.to(tl.int64) * width + column, mask=live, other=0)
        own = own.reshape(ROWS, PER, B).permute(1, 0, 2)  # [PER, ROWS, B]
        y = tl.dot(own, turn, input_precision="ieee").to(out.dtype.element_ty)
        place = row.to(tl.int64) * width + column
        tl.store(out + place, y.permute(1, 0, 2).reshape(ROWS, PER * B), mask=live)
        if TWO:
            y = tl.dot(own, turn2, input_precision="ieee").to(out.dtype.element_ty)
            place = (rows + row.to(tl.int64)) * width + column
            tl.store(out + place, y.permute(1, 0, 2).reshape(ROWS, PER * B), mask=live)


@triton.jit
def _back(
    x, dy, rotation, rotation2, out, slope, slope2, order, slots, rows, offsets, blocks,
    GATHER: tl.constexpr, TWO: tl.constexpr, B: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.load(offsets + expert + 1)
    width = blocks * B
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    inside = tl.arange(0, B)
    where = (expert.to(tl.int64) * blocks + block)[:, None, None] * B * B + inside[None, :, None] * B
    where += inside[None, None, :]
    known = (block < blocks)[:, None, None]
    turn = tl.load(rotation + where, mask=known, other=0).to(dy.dtype.element_ty).permute(0, 2, 1)
    turn2 = tl.load(rotation2 + where, mask=known, other=0).to(dy.dtype.element_ty).permute(0, 2, 1)
    acc = tl.zeros((PER, B, B), tl.float32)
    acc2 = tl.zeros((PER, B, B), tl.float32)
    column = tl.program_id(0) * (PER * B) + tl.arange(0, PER * B)[None, :]
    for first in range(tl.load(offsets + expert), end, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        live = (row < end) & (column < width)
        source = tl.load(order + row, mask=row < end, other=0) // slots if GATHER else row
        own = tl.load(x + source.to(tl.int64) * width + column, mask=live, other=0)
        own = own.reshape(ROWS, PER, B).permute(1, 2, 0)  # [PER, B, ROWS]
        place = row.to(tl.int64) * width + column
        d = tl.load(dy + place, mask=live, other=0).reshape(ROWS, PER, B).permute(1, 0, 2)  # [PER, ROWS, B]
        acc = tl.dot(own, d, acc, input_precision="ieee")
        dx = tl.dot(d, turn, input_precision="ieee")
        if TWO:
            second = (rows + row.to(tl.int64)) * width + column
            d = tl.load(dy + second, mask=live, other=0).reshape(ROWS, PER, B).permute(1, 0, 2)
            acc2 = tl.dot(own, d, acc2, input_precision="ieee")
            dx = tl.dot(d, turn2, dx, input_precision="ieee")
        tl.store(out + place, dx.to(out.dtype.element_ty).permute(1, 0, 2).reshape(ROWS, PER * B), mask=live)
    tl.store(slope + where, acc.to(slope.dtype.element_ty), mask=known)
    if TWO:
        tl.store(slope2 + where, acc2.to(slope2.dtype.element_ty), mask=known)
