"""The forward product for Hopper's matrix unit where experts have few rows: hopper_forward.py's sums, laid out anew.

Decoding touches the weights of a few experts once. What counts then is how many multiprocessors work, and how long the
one chain of sums over the reduction takes. So blocks have 64 or 128 weight rows and one warpgroup, several on a
multiprocessor; a stage is 256 columns of tokens, codes and scales behind one barrier; and a step decodes while the
matrix unit works on the step before. Scales come in lines of 8 or 16 bytes, which lanes of the producer copy better
than the copy engine does.
The order of summation is the same: the bits are those of hopper_forward.

Shape letters: BM tokens of a tile, ROWS weight rows of a block, COLUMNS of the reduction in a stage, WIDE in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from orbit_kernels.chained import after_previous, chained
from orbit_kernels.fragments import E2M1_WORD, INT4_WORD
from orbit_kernels.hopper import EIGHT, RANK_STEP, barriers, halves, join8, low_rank_operands, shared_layout, store_rows
from orbit_kernels.routing import Tiles

COLUMNS = gl.constexpr(256)
GROUPS = gl.constexpr(8)  # of 32 columns in a stage
WARPS = gl.constexpr(4)  # that multiply
MATRICES = gl.constexpr(4)  # steps of a low-rank matrix that the codes of a stage have room for
# Four exponents as BF16 numbers; byte 0 is 2^-127, a subnormal, and 255 comes out as infinity.
UE8M0 = gl.constexpr("""{ .reg .b32 a, b, least; mov.b32 least, 0x00400040;
prmt.b32 a, $2, 0, 0x4140; shl.b32 a, a, 7; max.u16x2 $0, a, least;
prmt.b32 b, $2, 0, 0x4342; shl.b32 b, b, 7; max.u16x2 $1, b, least; }""")


@gluon.constexpr_function
def _by_row(inside, lanes, rows: int, columns: int):
    """A layout [rows, columns] in which a thread holds what belongs to its rows of the left operand."""
    registers = [*inside, [8, 0], *([[64, 0]] if rows == 128 else [])]
    lanes = [*lanes, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def _weights(words, scales, FMT: gl.constexpr, A: gl.constexpr):
    """A operand [n, 32 g] from words [n, 4 g] and scales [n, g]."""
    TEXT: gl.constexpr = INT4_WORD if FMT == "int4" else E2M1_WORD
    n: gl.constexpr = scales.shape[0]
    g: gl.constexpr = scales.shape[1]
    r0, r1, r2, r3, r4, r5, r6, r7 = gl.inline_asm_elementwise(
        TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=EIGHT, is_pure=True, pack=1
    )
    joined = join8(r0, r1, r2, r3, r4, r5, r6, r7).reshape([n, g, 4, 2, 2, 2])
    codes = joined.permute([0, 1, 4, 3, 2, 5]).reshape([n, g, 32])
    scales = gl.convert_layout(scales, gl.SliceLayout(2, codes.type.layout))
    return gl.convert_layout((codes * scales.expand_dims(2)).reshape([n, 32 * g]), A)


@gluon.jit
def _consumer(
    xs, ws, ss, ms, ready, free, out, tile_group, tile_start, tile_count, offsets, inputs, part_rows,
    PARTS: gl.constexpr, BM: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    ROWS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SCALES: gl.constexpr = _by_row([[0, 1], [0, 2], [0, 4]], [[0, 0], [0, 0]], ROWS, GROUPS)
    WORDS: gl.constexpr = _by_row([[0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2]], ROWS, 32)
    blocks = PARTS * (part_rows // ROWS)
    total = gl.load(tile_count) * blocks
    STEPS: gl.constexpr = COLUMNS // WIDE
    step = 0
    for pair in range(gl.program_id(0), total, gl.num_programs(0)):
        owner = gl.load(tile_group + pair // blocks)
        row = gl.load(tile_start + pair // blocks)
        end = gl.load(offsets + owner + 1)
        acc = warpgroup_mma_init(gl.zeros([ROWS, BM], gl.float32, MMA))
        held = gl.zeros([ROWS, WIDE], gl.bfloat16, A)  # the operand that the matrix unit may still be reading
        first_step = step
        for _ in range(0, inputs, COLUMNS):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            words = ws.index(stage).load(WORDS)  # [ROWS, 32]
            scales = ss.index(stage).load(SCALES)  # [ROWS, 8]
            if FMT == "mxfp4":
                scales = gl.inline_asm_elementwise(UE8M0, "=r,=r,r", [scales], dtype=gl.bfloat16, is_pure=True, pack=4)
            for part in gl.static_range(STEPS):
                weights = _weights(_piece(words, part, STEPS), _piece(scales, part, STEPS), FMT, A)
                acc, held, weights = warpgroup_mma_wait(0, [acc, held, weights])
                tokens = xs.index(stage * STEPS + part).permute([1, 0])
                acc = warpgroup_mma(weights, tokens, acc, is_async=True)
                held = weights
                if part == 0:
                    gl.thread_barrier()  # all warps are past the previous stage
                    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > first_step)
            step += 1
        for _ in gl.static_range(RANK // RANK_STEP):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            narrow = ms.index(stage * MATRICES).load(A)  # [ROWS, 16] of B
            acc, held, narrow = warpgroup_mma_wait(0, [acc, held, narrow])
            tokens = xs.index(stage * STEPS).slice(0, RANK_STEP, dim=1).permute([1, 0])
            acc = warpgroup_mma(narrow, tokens, acc, is_async=True)
            held = narrow
            gl.thread_barrier()
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        total_acc, held = warpgroup_mma_wait(0, [acc, held])
        gl.thread_barrier()
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
        first = (pair % blocks) * ROWS
        tile = total_acc.to(gl.bfloat16).permute([1, 0])
        store_rows(tile, out, row, end, first, PARTS * part_rows, WARPS)


@gluon.jit
def _piece(columns, part: gl.constexpr, PARTS: gl.constexpr):
    """Part `part` of the columns of a tensor [n, m], in registers."""
    own = columns
    if PARTS > 1:
        left, right = halves(columns)
        HALF: gl.constexpr = PARTS // 2
        own = _piece(left if part < HALF else right, part % HALF, HALF)
    return own


@gluon.jit
def _producer(
    x, stored, scale, low, matrix, matrix2, xs, ws, ss, ms, ready, free, tile_group, tile_start, tile_count, inputs,
    part_rows, x_part_rows, slots,
    PARTS: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr, ROWS: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    per_part = part_rows // ROWS
    blocks = PARTS * per_part
    total = gl.load(tile_count) * blocks
    STEPS: gl.constexpr = COLUMNS // WIDE
    LINES: gl.constexpr = gl.BlockedLayout([1, GROUPS], [32, 1], [1, 1], [1, 0])
    line = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))[:, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, LINES))[None, :]
    step = 0
    for pair in range(gl.program_id(0), total, gl.num_programs(0)):
        block = pair % blocks
        part = block // per_part
        owner = gl.load(tile_group + pair // blocks)
        row = gl.load(tile_start + pair // blocks)
        x_row = row + part * x_part_rows
        weight_row = owner // slots * PARTS * part_rows + block * ROWS
        lines = scale + (weight_row + line).to(gl.int64) * (inputs // COLUMNS * GROUPS) + group
        for k in range(0, inputs, COLUMNS):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), STEPS * x.block_type.nbytes + stored.block_type.nbytes)
            tma.async_copy_global_to_shared(stored, [weight_row, k // 8], ready.index(stage), ws.index(stage))
            async_copy.async_copy_global_to_shared(ss.index(stage), lines + k // COLUMNS * GROUPS)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            for piece in gl.static_range(STEPS):
                to = xs.index(stage * STEPS + piece)
                tma.async_copy_global_to_shared(x, [x_row, k + piece * WIDE], ready.index(stage), to)
            step += 1
        for r in gl.static_range(0, RANK, RANK_STEP):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), low.block_type.nbytes + matrix.block_type.nbytes)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            tma.async_copy_global_to_shared(low, [row, part * RANK + r], ready.index(stage), xs.index(stage * STEPS))
            where = [owner * part_rows + block % per_part * ROWS, r]
            if part == 0:
                tma.async_copy_global_to_shared(matrix, where, ready.index(stage), ms.index(stage * MATRICES))
            else:
                tma.async_copy_global_to_shared(matrix2, where, ready.index(stage), ms.index(stage * MATRICES))
            step += 1


@gluon.jit(do_not_specialize=["x_part_rows"])
def few_kernel(
    x, stored, scale, low, matrix, matrix2, out, tile_group, tile_start, tile_count, offsets, inputs, part_rows,
    x_part_rows, slots,
    PARTS: gl.constexpr, BM: gl.constexpr, FMT: gl.constexpr, STAGES: gl.constexpr, RANK: gl.constexpr,
    ROWS: gl.constexpr, WIDE: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """As `hopper_forward.forward_kernel`."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * (COLUMNS // WIDE)] + x.block_type.shape, x.layout)
    ws = gl.allocate_shared_memory(stored.dtype, [STAGES] + stored.block_type.shape, stored.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ss = gl.allocate_shared_memory(scale.dtype.element_ty, [STAGES, ROWS, GROUPS], FLAT)
    ms = ws
    if RANK:
        ms = ws._reinterpret(gl.bfloat16, [STAGES * MATRICES, ROWS, RANK_STEP], matrix.layout)
    ready = barriers(STAGES, 33)  # the copy engine, and each lane that copies scales
    free = barriers(STAGES, 1)
    fence_async_shared()
    after_previous(CHAINED)
    gl.warp_specialize(
        [
            (_consumer, (xs, ws, ss, ms, ready, free, out, tile_group, tile_start, tile_count, offsets, inputs,
                         part_rows, PARTS, BM, FMT, STAGES, RANK, ROWS, WIDE)),
            (_producer, (x, stored, scale, low, matrix, matrix2, xs, ws, ss, ms, ready, free, tile_group, tile_start,
                         tile_count, inputs, part_rows, x_part_rows, slots, PARTS, FMT, STAGES, RANK, ROWS, WIDE)),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """How the work is cut; no bit depends on it."""

    rows: int
    wide: int
    stages: int  # at most; ptxas serialises the matrix unit where there are two
    registers: int  # of a thread in the mean; consumers take what the producer leaves
    per_multiprocessor: int  # at most


# H200, the shapes of bench_plan.DECODING. Kimi's w13 under tensor parallelism, one token: 15 us in SHORT blocks, 21 in
# TALL ones, which are half as many; from 16 tokens on TALL takes 0.8 to 1.04 of SHORT's time. More stages, steps of the
# other width, blocks of two warpgroups, four blocks a multiprocessor: equal or slower.
SHORT = Block(rows=64, wide=128, stages=4, registers=80, per_multiprocessor=3)
TALL = Block(rows=128, wide=64, stages=3, registers=128, per_multiprocessor=2)
SHARED_MEMORY = 225_000  # bytes of a multiprocessor that stages may take


def forward(
    x: torch.Tensor,
    weight,
    out: torch.Tensor,
    tiles: Tiles,
    offsets: torch.Tensor,
    x_part_rows: int,
    multiprocessors: int,
    low=None,
    slots: int = 1,
    block: Block | None = None,
):
    """As `hopper_forward.forward`, for tiles of 8, 16 or 32 rows."""
    experts, outputs, inputs = weight.shape
    most = tiles.expert.numel()
    if block is None:
        at_once = most * outputs <= multiprocessors * SHORT.per_multiprocessor * SHORT.rows
        block = SHORT if at_once or (outputs // weight.parts) % TALL.rows else TALL
    words = weight.packed.view(torch.int32).view(experts * outputs, -1)
    x_box, word_box, matrix_box = [tiles.size, block.wide], [block.rows, 32], [block.rows, 16]
    stage = 512 * tiles.size + (128 + 8 * weight.scale.element_size()) * block.rows  # bytes
    rows = TensorDescriptor.from_tensor(x.view(-1, inputs), x_box, shared_layout(x_box, gl.bfloat16))
    resident = min(block.per_multiprocessor, SHARED_MEMORY // (3 * stage))
    lows = low_rank_operands(low, rows, matrix_box)
    few_kernel[(min(multiprocessors * resident, most * outputs // block.rows),)](
        rows,
        TensorDescriptor.from_tensor(words, word_box, shared_layout(word_box, gl.int32)),
        weight.scale, *lows, out, tiles.expert, tiles.start, tiles.count, offsets, inputs,
        outputs // weight.parts, x_part_rows, slots,
        PARTS=weight.parts, BM=tiles.size, FMT=weight.fmt,
        STAGES=min(block.stages, SHARED_MEMORY // resident // stage),
        RANK=0 if low is None else low.rank, ROWS=block.rows, WIDE=block.wide,
        num_warps=WARPS.value, maxnreg=block.registers, **chained(),
    )  # fmt: skip
