"""The forward product for Hopper's matrix unit, in Gluon: `grouped_tiles.forward_kernel` with its schedule written out.

Shape letters: BM tokens of a tile; BLOCK, BLOCK, STEP as in hopper.py. Scales come in boxes of 256 columns, four steps.
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

from orbit_kernels.fragments import E2M1_WORD, INT4_WORD
from orbit_kernels.hopper import (
    BLOCK,
    EIGHT,
    RANK_STEP,
    STEP,
    barriers,
    halves,
    join8,
    load_scales,
    low_rank_operands,
    scale_start,
    shared_layout,
    store_rows,
)
from orbit_kernels.routing import Tiles


@gluon.jit
def _weights(words, scale, FMT: gl.constexpr, A: gl.constexpr):
    """A operand [256, 32] from words [256, 4] and the scales [256] of this 32-group."""
    TEXT: gl.constexpr = INT4_WORD if FMT == "int4" else E2M1_WORD
    r0, r1, r2, r3, r4, r5, r6, r7 = gl.inline_asm_elementwise(
        TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=EIGHT, is_pure=True, pack=1
    )
    joined = join8(r0, r1, r2, r3, r4, r5, r6, r7).reshape([BLOCK, 4, 2, 2, 2])
    codes = gl.convert_layout(joined.permute([0, 3, 2, 1, 4]).reshape([BLOCK, 32]), A)
    return codes * gl.convert_layout(scale, gl.SliceLayout(1, A))[:, None]


@gluon.jit
def _consumer(
    xs, ws, ss, ms, ready, free, s_ready, s_free, out, tile_group, tile_start, tile_count, offsets, inputs, part_rows,
    PARTS: gl.constexpr, BM: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, S_STAGES: gl.constexpr,
    RANK: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    # Every thread holds the scales of its own rows.
    NARROW: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [128, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]], [], [256, 8],
    )  # fmt: skip
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 4], [8, 0], [128, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]], [], [256, 8]
    )
    blocks = PARTS * (part_rows // BLOCK)
    total = gl.load(tile_count) * blocks
    step = 0
    group = 0
    for pair in range(gl.program_id(0), total, gl.num_programs(0)):
        owner = gl.load(tile_group + pair // blocks)
        row = gl.load(tile_start + pair // blocks)
        end = gl.load(offsets + owner + 1)
        acc = warpgroup_mma_init(gl.zeros([BLOCK, BM], gl.float32, MMA))
        held = gl.zeros([BLOCK, 32], gl.bfloat16, A)  # the operand that the matrix unit may still be reading
        first_step = step
        for k in range(0, inputs, 256):
            slot = group % S_STAGES
            mbarrier.wait(s_ready.index(slot), (group // S_STAGES) & 1)
            scales = load_scales(ss.index(slot), k % 512 == 256, FMT, NARROW)  # [256, 8]
            s0123, s4567 = halves(scales)
            s01, s23 = halves(s0123)
            s45, s67 = halves(s4567)
            s0, s1 = gl.split(s01)
            s2, s3 = gl.split(s23)
            s4, s5 = gl.split(s45)
            s6, s7 = gl.split(s67)
            gl.thread_barrier()
            mbarrier.arrive(s_free.index(slot), count=1)
            group += 1
            for quarter in gl.static_range(4):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                left, right = halves(ws.index(stage).load(WORDS))  # [256, 4], a 32-group each
                tokens = xs.index(stage)
                if quarter == 0:
                    weights = _weights(left, s0, FMT, A)
                elif quarter == 1:
                    weights = _weights(left, s2, FMT, A)
                elif quarter == 2:
                    weights = _weights(left, s4, FMT, A)
                else:
                    weights = _weights(left, s6, FMT, A)
                acc = warpgroup_mma(weights, tokens.slice(0, 32, dim=1).permute([1, 0]), acc, is_async=True)
                warpgroup_mma_wait(1, [held])
                held = weights
                gl.thread_barrier()  # all warps are past the previous step
                mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > first_step)
                if quarter == 0:
                    weights = _weights(right, s1, FMT, A)
                elif quarter == 1:
                    weights = _weights(right, s3, FMT, A)
                elif quarter == 2:
                    weights = _weights(right, s5, FMT, A)
                else:
                    weights = _weights(right, s7, FMT, A)
                acc = warpgroup_mma(weights, tokens.slice(32, 32, dim=1).permute([1, 0]), acc, is_async=True)
                warpgroup_mma_wait(1, [held])
                held = weights
                step += 1
        for _ in gl.static_range(RANK // RANK_STEP):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            narrow = ms.index(stage).load(A)  # [256, 16] of B
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
        first = (pair % blocks) * BLOCK
        store_rows(total_acc.to(gl.bfloat16).permute([1, 0]), out, row, end, first, PARTS * part_rows)


@gluon.jit
def _producer(
    x, stored, scale, low, matrix, matrix2, xs, ws, ss, ms, ready, free, s_ready, s_free, tile_group, tile_start,
    tile_count, inputs, part_rows, x_part_rows, slots,
    PARTS: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, S_STAGES: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    per_part = part_rows // BLOCK
    blocks = PARTS * per_part
    total = gl.load(tile_count) * blocks
    step = 0
    group = 0
    for pair in range(gl.program_id(0), total, gl.num_programs(0)):
        block = pair % blocks
        part = block // per_part
        owner = gl.load(tile_group + pair // blocks)
        row = gl.load(tile_start + pair // blocks)
        x_row = row + part * x_part_rows
        weight_row = owner // slots * PARTS * part_rows + block * BLOCK
        for k in range(0, inputs, 256):
            slot = group % S_STAGES
            mbarrier.wait(s_free.index(slot), ((group // S_STAGES) & 1) ^ 1)
            mbarrier.expect(s_ready.index(slot), scale.block_type.nbytes)
            start = scale_start(k, FMT)
            tma.async_copy_global_to_shared(scale, [weight_row, start], s_ready.index(slot), ss.index(slot))
            group += 1
            for quarter in range(4):
                stage = step % STAGES
                mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(stage), x.block_type.nbytes + stored.block_type.nbytes)
                column = k + quarter * STEP
                tma.async_copy_global_to_shared(x, [x_row, column], ready.index(stage), xs.index(stage))
                where = [weight_row, column // 8]
                tma.async_copy_global_to_shared(stored, where, ready.index(stage), ws.index(stage))
                step += 1
        for r in gl.static_range(0, RANK, RANK_STEP):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), low.block_type.nbytes + matrix.block_type.nbytes)
            tma.async_copy_global_to_shared(low, [row, part * RANK + r], ready.index(stage), xs.index(stage))
            where = [owner * part_rows + block % per_part * BLOCK, r]
            if part == 0:
                tma.async_copy_global_to_shared(matrix, where, ready.index(stage), ms.index(stage))
            else:
                tma.async_copy_global_to_shared(matrix2, where, ready.index(stage), ms.index(stage))
            step += 1


@gluon.jit(do_not_specialize=["x_part_rows"])
def forward_kernel(
    x, stored, scale, low, matrix, matrix2, out, tile_group, tile_start, tile_count, offsets, inputs, part_rows,
    x_part_rows, slots,
    PARTS: gl.constexpr, BM: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, S_STAGES: gl.constexpr,
    RANK: gl.constexpr,
):  # fmt: skip
    """out[row, n] = x[row] . W[expert, n] for all tiles; part p of N reads x from row p * x_part_rows on.

    With RANK the sum goes on over low[row, p * RANK:] . matrix p [group, n], in the stages that held x and W before.
    """
    xs = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(stored.dtype, [STAGES] + stored.block_type.shape, stored.layout)
    ss = gl.allocate_shared_memory(scale.dtype, [S_STAGES] + scale.block_type.shape, scale.layout)
    ms = ws
    if RANK:
        ms = ws._reinterpret(gl.bfloat16, [STAGES, BLOCK, RANK_STEP], matrix.layout)
    ready = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    s_ready = barriers(S_STAGES, 1)
    s_free = barriers(S_STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (xs, ws, ss, ms, ready, free, s_ready, s_free, out, tile_group, tile_start, tile_count,
                         offsets, inputs, part_rows, PARTS, BM, FMT, STAGES, S_STAGES, RANK)),
            (_producer, (x, stored, scale, low, matrix, matrix2, xs, ws, ss, ms, ready, free, s_ready, s_free,
                         tile_group, tile_start, tile_count, inputs, part_rows, x_part_rows, slots, PARTS, FMT,
                         STAGES, S_STAGES, RANK)),
        ],
        [1],
        [24],
    )  # fmt: skip


def forward(
    x: torch.Tensor,
    weight,
    out: torch.Tensor,
    tiles: Tiles,
    offsets: torch.Tensor,
    x_part_rows: int,
    grid: int,
    low=None,
    slots: int = 1,
):
    """Launch over checked tensors; `weight` is a `PackedExperts` of INT4 or MXFP4, `low` a `LowRank` of grouped.py.

    Tiles and offsets are of groups, `slots` for each expert.
    """
    experts, outputs, inputs = weight.shape
    words = weight.packed.view(torch.int32).view(experts * outputs, -1)
    scale = weight.scale.view(experts * outputs, -1)
    x_box, word_box, scale_box, matrix_box = [tiles.size, 64], [256, 8], [256, 16 // scale.element_size()], [256, 16]
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * scale.element_size(), rank=2)
    stages = min(8, (200_000 - 8192) // (tiles.size * 128 + 8192))
    rows = TensorDescriptor.from_tensor(x.view(-1, inputs), x_box, shared_layout(x_box, gl.bfloat16))
    lows = low_rank_operands(low, rows, matrix_box)
    forward_kernel[(grid,)](
        rows,
        TensorDescriptor.from_tensor(words, word_box, shared_layout(word_box, gl.int32)),
        TensorDescriptor.from_tensor(scale, scale_box, flat),
        *lows, out, tiles.expert, tiles.start, tiles.count, offsets, inputs, outputs // weight.parts,
        x_part_rows, slots,
        PARTS=weight.parts, BM=tiles.size, FMT=weight.fmt, STAGES=stages, S_STAGES=2,
        RANK=0 if low is None else low.rank, num_warps=8,
    )  # fmt: skip
