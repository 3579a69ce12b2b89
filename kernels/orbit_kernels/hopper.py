"""What the Hopper kernels of both directions share: a block's shape, its barriers and operands, scales as numbers,
the store.

A block is one producer warp, which keeps the copy engine fed, and eight consumer warps with BLOCK weight rows and all
tokens of the tile: wide in weights, which are a quarter of the bytes. Consumers decode the weights of step i + 1 while
the matrix unit works on step i. The registers of step i are named in the wait: else the compiler gives them to the
decode while they are still being read, and the numbers are wrong, or right by luck.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK = gl.constexpr(256)  # weight rows
STEP = gl.constexpr(64)  # of the reduction
RANK_STEP = gl.constexpr(16)  # of the low-rank sum at its end
shared_layout = gl.NVMMASharedLayout.get_default_for
EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@gluon.jit
def join8(r0, r1, r2, r3, r4, r5, r6, r7):
    """[..., i0, i1, i2] of eight tensors i = i0 + 2 i1 + 4 i2."""
    return gl.join(gl.join(gl.join(r0, r1), gl.join(r2, r3)), gl.join(gl.join(r4, r5), gl.join(r6, r7)))


@gluon.jit
def halves(columns):
    """[n, 2 m] -> two [n, m], the first and the second half of the columns."""
    n: gl.constexpr = columns.shape[0]
    m: gl.constexpr = columns.shape[1] // 2
    return gl.split(columns.reshape([n, 2, m]).permute([0, 2, 1]))


@gluon.jit
def load_scales(lines, second, FMT: gl.constexpr, LAYOUT: gl.constexpr):
    """BF16 scales [n, 8] of 256 columns from a 16-byte line for each of n rows; see `fragments.group_scale`.

    One-byte scales fill half a line, the second half if `second`: the copy engine faults on an unaligned start.
    """
    held = lines.slice(0, 8, dim=1).load(LAYOUT)
    if FMT == "mxfp4":
        held = gl.where(second, lines.slice(8, 8, dim=1).load(LAYOUT), held)
        # The exponent of BF16; byte 0 is 2^-127, a subnormal, and 255 comes out as infinity.
        held = gl.maximum(held.to(gl.int16) << 7, 0x0040).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return held


@gluon.jit
def scale_start(column, FMT: gl.constexpr):
    """Where the line of scales of `column` (a multiple of 256) starts."""
    return column // 512 * 16 if FMT == "mxfp4" else column // 32


@gluon.jit
def store_rows(tile, out, row, end, first, width, WARPS: gl.constexpr = 8):
    """Write tile [BM, N] to out[row + m, first + n] where row + m < end; `width` elements a row."""
    BM: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [WARPS, 1], [1, 0])
    tile = gl.convert_layout(tile, OUT)
    m = row + gl.arange(0, BM, gl.SliceLayout(1, OUT))
    n = first + gl.arange(0, N, gl.SliceLayout(0, OUT))
    gl.store(out + m[:, None].to(gl.int64) * width + n[None, :], tile, mask=(m < end)[:, None])


def low_rank_operands(low, rows: TensorDescriptor, matrix_box: list[int]) -> list[TensorDescriptor]:
    """Descriptors of a `LowRank`'s rows, in boxes as those of `rows`, and of its first and last matrix; `rows` stands
    in where there is none, and is not read."""
    if low is None:
        return [rows] * 3
    layout = shared_layout(matrix_box, gl.bfloat16)
    matrices = [own.view(-1, own.shape[-1]) for own in (low.matrices[0], low.matrices[-1])]
    return [
        TensorDescriptor.from_tensor(low.rows, rows.block_shape, rows.layout),
        *(TensorDescriptor.from_tensor(own, matrix_box, layout) for own in matrices),
    ]


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that ARRIVALS arrivals complete."""
    held = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(held.index(index), count=ARRIVALS)
    return held
