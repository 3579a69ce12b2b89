"""The Triton kernels behind grouped.py: one tile of tokens against one block of weights at a time.

A program stays and takes every n-th (token tile, block) pair. Pairs are ordered by expert, then token tile, then block,
so that the tiles of one expert find its packed weights in L2. An expert's last tile runs at half or quarter size if it
fits (TAILS of these).

Shape letters: BM tokens of a tile, BLOCK rows of the product (N forward, K backward), STEP of the reduction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from orbit_kernels.fragments import (
    column_of_row,
    columns_in_order,
    fp8_number,
    group_scale,
    nibbles_across_rows,
    nibbles_along_rows,
    settled,
)

FP8_BLOCK = tl.constexpr(128)


@triton.jit(do_not_specialize=["x_part_rows"])
def forward_kernel(
    x_full, x_half, x_quarter, stored, scale, factor, low, matrix, matrix2, out, tile_group, tile_start, tile_count,
    offsets, inputs, part_rows, x_part_rows, slots,
    PARTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, FMT: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, TAILS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """out[row, n] = x[row] . W[expert, n] for all tiles; part p of N reads x from row p * x_part_rows on.

    With RANK the sum goes on over low[row, p * RANK:] . matrix p [group, n]; an expert has `slots` groups.
    """
    per_part = tl.cdiv(part_rows, BLOCK)
    blocks = PARTS * per_part
    total = tl.load(tile_count) * blocks
    for pair in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = pair // blocks
        block = pair % blocks
        owner = tl.load(tile_group + tile)
        row = tl.load(tile_start + tile)
        end = tl.load(offsets + owner + 1)
        part = block // per_part
        first = (block % per_part) * BLOCK  # within the part
        x_row = row + part * x_part_rows
        if (TAILS >= 2) & (end - row <= BM // 4):
            _forward_tile(
                x_quarter, stored, scale, factor, low, matrix, matrix2, out, owner, slots, row, x_row, end, part, first,
                inputs, part_rows, PARTS, BM // 4 if TAILS >= 2 else BM, BLOCK, STEP, FMT, ASM, EVEN, RANK,
            )  # fmt: skip
        elif (TAILS >= 1) & (end - row <= BM // 2):
            _forward_tile(
                x_half, stored, scale, factor, low, matrix, matrix2, out, owner, slots, row, x_row, end, part, first,
                inputs, part_rows, PARTS, BM // 2 if TAILS >= 1 else BM, BLOCK, STEP, FMT, ASM, EVEN, RANK,
            )  # fmt: skip
        else:
            _forward_tile(
                x_full, stored, scale, factor, low, matrix, matrix2, out, owner, slots, row, x_row, end, part, first,
                inputs, part_rows, PARTS, BM, BLOCK, STEP, FMT, ASM, EVEN, RANK,
            )  # fmt: skip


@triton.jit
def _low_dot(narrow, tokens, acc):
    """acc + narrow [BLOCK, r] tokens [r, BM]."""
    return tl.dot(narrow.to(tokens.dtype), tokens, acc, input_precision="ieee")


@triton.jit
def _forward_tile(
    x, stored, scale, factor, low, matrix, matrix2, out, owner, slots, row, x_row, end, part, first, inputs, part_rows,
    PARTS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, FMT: tl.constexpr,
    ASM: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    expert = owner // slots
    weight_row = (expert * PARTS + part) * part_rows + first
    n = tl.arange(0, BLOCK)
    live = first + n < part_rows
    acc = tl.zeros((BLOCK, BM), tl.float32)
    for k in range(0, inputs, STEP):
        tokens = x.load([x_row, k])  # [BM, STEP]
        if FMT == "bf16":
            weights = stored.load([weight_row, k])  # [BLOCK, STEP]
        elif FMT == "fp8":
            block_row = (expert * PARTS + part) * tl.cdiv(part_rows, FP8_BLOCK) + first // FP8_BLOCK
            factor_128 = tl.load(scale + block_row * tl.cdiv(inputs, FP8_BLOCK) + k // FP8_BLOCK)
            weights = fp8_number(stored.load([weight_row, k])) * factor_128
        else:
            codes = nibbles_along_rows(stored.load([weight_row, k // 8]), FMT, ASM)
            SIZE: tl.constexpr = 16 if FMT == "nvfp4" else 32
            groups = inputs // SIZE
            group = k // SIZE + tl.arange(0, STEP // SIZE)
            where = (weight_row + n)[:, None].to(tl.int64) * groups + group[None, :]
            if EVEN:
                held = tl.load(scale + where)
            else:
                held = tl.load(scale + where, mask=live[:, None] & (group < groups)[None, :], other=0)
            own = group_scale(held, FMT, ASM)  # [BLOCK, STEP / SIZE]
            if SIZE == 32:
                spread = own[:, :, None].broadcast_to(BLOCK, STEP // 32, 32)
            else:  # position 8 c + 2 t + j of a 32-group: words t < 2 hold its first 16 columns
                pair = own.reshape(BLOCK, STEP // 32, 1, 2, 1)
                spread = pair.broadcast_to(BLOCK, STEP // 32, 4, 2, 4)
            weights = codes * spread.reshape(BLOCK, STEP)
        acc = settled(tl.dot(weights.to(tokens.dtype), tokens.T, acc), ASM)
    if FMT == "nvfp4":
        acc = acc * tl.load(factor + expert)
    m = row + tl.arange(0, BM)
    if RANK:
        r = tl.arange(0, RANK)
        own = matrix if part == 0 else matrix2
        where = (owner * part_rows + first + n)[:, None].to(tl.int64) * RANK + r[None, :]
        narrow = tl.load(own + where, mask=live[:, None], other=0)
        where = m[None, :].to(tl.int64) * (PARTS * RANK) + (part * RANK + r)[:, None]
        acc = settled(_low_dot(narrow, tl.load(low + where, mask=(m < end)[None, :], other=0), acc), ASM)
    where = m[None, :].to(tl.int64) * (PARTS * part_rows) + (part * part_rows + first + n)[:, None]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=(m < end)[None, :] & live[:, None])


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    dy_full, dy_half, dy_quarter, stored, scale, factor, low, matrix, matrix2, out, tile_expert, tile_start, tile_count,
    offsets, inputs, part_rows, rows,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    FMT: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, TAILS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """out[row, k] = sum over n of dy[row, n] W[expert, n, k]; with SPLITS part p of N goes to row p * rows + row.

    With RANK the sum goes on over low[row, p * RANK + r] matrix p [expert, r, k], p a part of N.
    """
    per_split = tl.cdiv(inputs, BLOCK)
    blocks = SPLITS * per_split
    total = tl.load(tile_count) * blocks
    for pair in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = pair // blocks
        block = pair % blocks
        expert = tl.load(tile_expert + tile)
        row = tl.load(tile_start + tile)
        end = tl.load(offsets + expert + 1)
        split = block // per_split
        first = (block % per_split) * BLOCK
        if (TAILS >= 2) & (end - row <= BM // 4):
            _gradient_tile(
                dy_quarter, stored, scale, factor, low, matrix, matrix2, out, expert, row, end, split, first, inputs,
                part_rows, rows, PARTS, SPLITS, BM // 4 if TAILS >= 2 else BM, BLOCK, STEP, FMT, ASM, EVEN, RANK,
            )  # fmt: skip
        elif (TAILS >= 1) & (end - row <= BM // 2):
            _gradient_tile(
                dy_half, stored, scale, factor, low, matrix, matrix2, out, expert, row, end, split, first, inputs,
                part_rows, rows, PARTS, SPLITS, BM // 2 if TAILS >= 1 else BM, BLOCK, STEP, FMT, ASM, EVEN, RANK,
            )  # fmt: skip
        else:
            _gradient_tile(
                dy_full, stored, scale, factor, low, matrix, matrix2, out, expert, row, end, split, first, inputs,
                part_rows, rows, PARTS, SPLITS, BM, BLOCK, STEP, FMT, ASM, EVEN, RANK,
            )  # fmt: skip


@triton.jit
def _gradient_tile(
    dy, stored, scale, factor, low, matrix, matrix2, out, expert, row, end, split, first, inputs, part_rows, rows,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    FMT: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    outputs = PARTS * part_rows
    begin = split * part_rows
    last = begin + part_rows if SPLITS > 1 else outputs
    n = tl.arange(0, STEP)
    acc = tl.zeros((BLOCK, BM), tl.float32)
    for step in range(begin, last, STEP):
        tokens = dy.load([row, step])  # [BM, STEP]
        weight_row = expert * outputs + step
        if FMT == "bf16":
            weights = stored.load([weight_row, first]).T  # [BLOCK, STEP]
            if not EVEN:
                weights = tl.where((step + n < last)[None, :], weights, 0)
        elif FMT == "fp8":
            decoded = fp8_number(stored.load([weight_row, first]))  # [STEP, BLOCK]
            block_row = step // part_rows * tl.cdiv(part_rows, FP8_BLOCK) + step % part_rows // FP8_BLOCK
            strip = scale + (expert * PARTS * tl.cdiv(part_rows, FP8_BLOCK) + block_row) * tl.cdiv(inputs, FP8_BLOCK)
            k = first + tl.arange(0, BLOCK)
            factor_128 = tl.load(strip + k // FP8_BLOCK, mask=k < inputs, other=0)
            decoded = decoded * factor_128[None, :]
            if not EVEN:
                decoded = tl.where((step + n < last)[:, None], decoded, 0)
            weights = decoded.to(tokens.dtype).T
        else:
            codes = nibbles_across_rows(stored.load([weight_row, first // 4]), FMT, ASM)  # [2, BLOCK/32, 2, 8, STEP]
            SIZE: tl.constexpr = 16 if FMT == "nvfp4" else 32
            groups = inputs // SIZE
            group = first // SIZE + tl.arange(0, BLOCK // SIZE)
            where = (weight_row + n)[None, :].to(tl.int64) * groups + group[:, None]
            if EVEN:
                held = tl.load(scale + where)
            else:
                held = tl.load(scale + where, mask=(step + n < last)[None, :] & (group < groups)[:, None], other=0)
            own = group_scale(held, FMT, ASM)  # [BLOCK / SIZE, STEP]
            if SIZE == 32:
                weights = codes * own[None, :, None, None, :]
            else:  # entries g < 4 of a 32-group are its first 16 columns
                pair = own.reshape(BLOCK // 32, 2, STEP)
                halves = codes.reshape(2, BLOCK // 32, 2, 2, 4, STEP)
                weights = halves * pair[None, :, None, :, None, :]
            weights = weights.reshape(BLOCK, STEP)
        acc = settled(tl.dot(weights.to(tokens.dtype), tokens.T, acc), ASM)
    if FMT == "nvfp4":
        acc = acc * tl.load(factor + expert)
    m = row + tl.arange(0, BM)
    if RANK:
        column = tl.arange(0, BLOCK)
        if FMT != "bf16" and FMT != "fp8":  # the rows of acc are in the order of nibbles_across_rows
            column = column_of_row(column, BLOCK)
        r = tl.arange(0, RANK)
        for part in tl.static_range(PARTS):
            own = matrix if part == 0 else matrix2
            where = (expert * RANK + r)[None, :].to(tl.int64) * inputs + (first + column)[:, None]
            narrow = tl.load(own + where, mask=(first + column < inputs)[:, None], other=0)
            where = m[None, :].to(tl.int64) * (PARTS * RANK) + (part * RANK + r)[:, None]
            acc = settled(_low_dot(narrow, tl.load(low + where, mask=(m < end)[None, :], other=0), acc), ASM)
    product = acc.T if FMT == "bf16" or FMT == "fp8" else columns_in_order(acc)  # [BM, BLOCK]
    k_out = first + tl.arange(0, BLOCK)
    where = (split * rows + m)[:, None].to(tl.int64) * inputs + k_out[None, :]
    tl.store(out + where, product.to(out.dtype.element_ty), mask=(m < end)[:, None] & (k_out < inputs)[None, :])
