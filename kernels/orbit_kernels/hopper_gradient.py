"""The input gradient for Hopper's matrix unit, in Gluon: `grouped_tiles.gradient_kernel` with its schedule written out.

W^T is read as 16-bit units of four codes along k, which the transposing shared-memory load moves whole; rows n, n + 1
are joined in the decode. The rows of the product come out permuted and are put in order at the store.

Shape letters: BM tokens of a tile; BLOCK columns of the gradient and STEP of the reduction over N as in hopper.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from orbit_kernels.fragments import E2M1_ROWS, INT4_ROWS
from orbit_kernels.hopper import (
    BLOCK,
    EIGHT,
    RANK_STEP,
    STEP,
    barriers,
    join8,
    load_scales,
    low_rank_operands,
    scale_start,
    shared_layout,
    store_rows,
)
from orbit_kernels.routing import Tiles


@gluon.jit
def _weights(units, scales, second, FMT: gl.constexpr, A: gl.constexpr):
    """A operand [256, 32] from units [32, 64] int16 (registers) and scales [32, 8 or 16] (shared memory)."""
    TEXT: gl.constexpr = INT4_ROWS if FMT == "int4" else E2M1_ROWS
    even, odd = gl.split(units.reshape([16, 2, 64]).permute([0, 2, 1]))
    r0, r1, r2, r3, r4, r5, r6, r7 = gl.inline_asm_elementwise(
        TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,h,h", [even, odd], dtype=EIGHT, is_pure=True, pack=1
    )
    joined = join8(r0, r1, r2, r3, r4, r5, r6, r7).reshape([16, 8, 8, 2, 2, 2])
    codes = joined.permute([5, 1, 4, 2, 0, 3]).reshape([2, 8, 2, 8, 32])
    CODES: gl.constexpr = codes.type.layout
    LINES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, CODES)))
    # Loaded as stored and transposed in registers: a transposed load from this shared layout mixes up the rows.
    STORED: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[0, 1], [0, 2], [0, 4]], [], [32, 8],
    )  # fmt: skip
    own = load_scales(scales, second, FMT, STORED).permute([1, 0])  # [8, 32]
    own = gl.convert_layout(own, LINES)
    return gl.convert_layout((codes * own.expand_dims(0).expand_dims(2).expand_dims(3)).reshape([256, 32]), A)


@gluon.jit
def _narrow(lines, A: gl.constexpr):
    """A operand [256, 16] from 16 rows of a low-rank matrix [16, 256] (shared memory), its columns as those of W^T."""
    HELD: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [8, 0], [0, 2]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [[0, 32], [0, 64], [0, 128]], [], [16, 256],
    )  # fmt: skip
    split = lines.load(HELD).reshape([16, 8, 8, 2, 2])  # column 32 w + 4 g + 2 p1 + p0
    return gl.convert_layout(split.permute([3, 1, 4, 2, 0]).reshape([256, 16]), A)


@gluon.jit
def _consumer(
    xs, ws, ss, ms, ready, free, out, tile_expert, tile_start, tile_count, offsets, inputs, outputs, rows,
    SPLITS: gl.constexpr, BM: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    UNITS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [1, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [0, 32]], [], [64, 64],
    )  # fmt: skip
    per_split = inputs // BLOCK
    blocks = SPLITS * per_split
    reduction = outputs // SPLITS
    total = gl.load(tile_count) * blocks
    step = 0
    for pair in range(gl.program_id(0), total, gl.num_programs(0)):
        block = pair % blocks
        expert = gl.load(tile_expert + pair // blocks)
        row = gl.load(tile_start + pair // blocks)
        end = gl.load(offsets + expert + 1)
        acc = warpgroup_mma_init(gl.zeros([BLOCK, BM], gl.float32, MMA))
        held = gl.zeros([BLOCK, 32], gl.bfloat16, A)  # the operand that the matrix unit may still be reading
        first_step = step
        odd = block % per_split % 2 == 1
        for _ in range(0, reduction, STEP):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            units = ws.index(stage).load(UNITS).reshape([2, 32, 64]).permute([1, 2, 0])
            upper, lower = gl.split(units)  # rows 0..31 and 32..63, [32, 64] each
            tokens = xs.index(stage)
            weights = _weights(upper, ss.index(stage).slice(0, 32, dim=0), odd, FMT, A)
            acc, held, weights = warpgroup_mma_wait(0, [acc, held, weights])
            acc = warpgroup_mma(weights, tokens.slice(0, 32, dim=1).permute([1, 0]), acc, is_async=True)
            held = weights
            gl.thread_barrier()  # all warps are past the previous step
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > first_step)
            weights = _weights(lower, ss.index(stage).slice(32, 32, dim=0), odd, FMT, A)
            acc, held, weights = warpgroup_mma_wait(0, [acc, held, weights])
            acc = warpgroup_mma(weights, tokens.slice(32, 32, dim=1).permute([1, 0]), acc, is_async=True)
            held = weights
            step += 1
        for _ in gl.static_range(RANKS // RANK_STEP):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            narrow = _narrow(ms.index(stage), A)
            acc, held, narrow = warpgroup_mma_wait(0, [acc, held, narrow])
            tokens = xs.index(stage).slice(0, RANK_STEP, dim=1).permute([1, 0])
            acc = warpgroup_mma(narrow, tokens, acc, is_async=True)
            held = narrow
            gl.thread_barrier()
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        total_acc, held = warpgroup_mma_wait(0, [acc, held])
        gl.thread_barrier()
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        ordered = total_acc.to(gl.bfloat16).reshape([2, 8, 2, 8, BM]).permute([4, 1, 3, 0, 2]).reshape([BM, BLOCK])
        shift = block // per_split * rows
        store_rows(ordered, out, row + shift, end + shift, block % per_split * BLOCK, inputs)


@gluon.jit
def _producer(
    dy, stored, scale, low, matrix, matrix2, xs, ws, ss, ms, ready, free, tile_expert, tile_start, tile_count, inputs,
    outputs, rank,
    SPLITS: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    per_split = inputs // BLOCK
    blocks = SPLITS * per_split
    reduction = outputs // SPLITS
    total = gl.load(tile_count) * blocks
    step = 0
    for pair in range(gl.program_id(0), total, gl.num_programs(0)):
        block = pair % blocks
        expert = gl.load(tile_expert + pair // blocks)
        row = gl.load(tile_start + pair // blocks)
        first = block // per_split * reduction
        column = block % per_split * BLOCK
        start = scale_start(column, FMT)
        for n in range(first, first + reduction, STEP):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            bytes_in: gl.constexpr = dy.block_type.nbytes + stored.block_type.nbytes + scale.block_type.nbytes
            mbarrier.expect(ready.index(stage), bytes_in)
            weight_row = expert * outputs + n
            tma.async_copy_global_to_shared(dy, [row, n], ready.index(stage), xs.index(stage))
            tma.async_copy_global_to_shared(stored, [weight_row, column // 4], ready.index(stage), ws.index(stage))
            tma.async_copy_global_to_shared(scale, [weight_row, start], ready.index(stage), ss.index(stage))
            step += 1
        for r in gl.static_range(0, RANKS, RANK_STEP):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), low.block_type.nbytes + matrix.block_type.nbytes)
            tma.async_copy_global_to_shared(low, [row, r], ready.index(stage), xs.index(stage))
            if r < rank:
                where = [expert * rank + r, column]
                tma.async_copy_global_to_shared(matrix, where, ready.index(stage), ms.index(stage))
            else:
                where = [expert * rank + r - rank, column]
                tma.async_copy_global_to_shared(matrix2, where, ready.index(stage), ms.index(stage))
            step += 1


@gluon.jit(do_not_specialize=["rows"])
def gradient_kernel(
    dy, stored, scale, low, matrix, matrix2, out, tile_expert, tile_start, tile_count, offsets, inputs, outputs, rows,
    rank,
    SPLITS: gl.constexpr, BM: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, RANKS: gl.constexpr,
):  # fmt: skip
    """out[row, k] = sum over n of dy[row, n] W[expert, n, k]; with SPLITS part p of N goes to row p * rows + row.

    With RANKS the sum goes on over low[row, r] matrix[expert, r, k], r from `rank` on those of the second matrix.
    """
    xs = gl.allocate_shared_memory(dy.dtype, [STAGES] + dy.block_type.shape, dy.layout)
    ws = gl.allocate_shared_memory(stored.dtype, [STAGES] + stored.block_type.shape, stored.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [STAGES] + scale.block_type.shape, scale.layout)
    ms = ws
    if RANKS:
        ms = ws._reinterpret(gl.bfloat16, [STAGES, RANK_STEP, BLOCK], matrix.layout)
    ready = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (xs, ws, ss, ms, ready, free, out, tile_expert, tile_start, tile_count, offsets, inputs,
                         outputs, rows, SPLITS, BM, FMT, STAGES, RANKS)),
            (_producer, (dy, stored, scale, low, matrix, matrix2, xs, ws, ss, ms, ready, free, tile_expert, tile_start,
                         tile_count, inputs, outputs, rank, SPLITS, FMT, STAGES, RANKS)),
        ],
        [1],
        [24],
    )  # fmt: skip


def gradient(
    dy: torch.Tensor,
    weight,
    out: torch.Tensor,
    tiles: Tiles,
    offsets: torch.Tensor,
    split: bool,
    grid: int,
    low=None,
):
    """Launch over checked tensors; `weight` is a `PackedExperts` of INT4 or MXFP4, `low` a `LowRank` of grouped.py."""
    experts, outputs, inputs = weight.shape
    units = weight.packed.view(torch.int16).view(experts * outputs, -1)
    scale = weight.scale.view(experts * outputs, -1)
    dy_box, unit_box, scale_box, matrix_box = [tiles.size, 64], [64, 64], [64, 16 // scale.element_size()], [16, 256]
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * scale.element_size(), rank=2)
    stages = min(8, (200_000 - 512 * tiles.size) // (tiles.size * 128 + 8192 + 1024))
    rows = TensorDescriptor.from_tensor(dy.view(-1, outputs), dy_box, shared_layout(dy_box, gl.bfloat16))
    lows = low_rank_operands(low, rows, matrix_box)
    gradient_kernel[(grid,)](
        rows,
        TensorDescriptor.from_tensor(units, unit_box, shared_layout(unit_box, gl.int16)),
        TensorDescriptor.from_tensor(scale, scale_box, flat),
        *lows, out, tiles.expert, tiles.start, tiles.count, offsets, inputs, outputs, dy.shape[0],
        0 if low is None else low.rank,
        SPLITS=weight.parts if split else 1, BM=tiles.size, FMT=weight.fmt, STAGES=stages,
        RANKS=0 if low is None else low.rows.shape[1], num_warps=8,
    )  # fmt: skip
