"""Stored weights of chosen experts to a dense chunk in one pass: `decode.dequantize` as a kernel, bit for bit.

For the path by way of decoded chunks (chunked.py). The product of code and scale is formed in float32 and rounded once,
as the reference does; a program reads a block of stored bytes once and writes whole rows.

Shape letters: E experts, C experts of a chunk, N outputs, K inputs, G columns of a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orbit_kernels.decode import FP8_BLOCK, GROUP
from orbit_kernels.grouped import PackedExperts

BLOCK = 8192
"""Weights of a program: 32 of each of 256 threads."""


def decode_experts(weight: PackedExperts, experts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out [C, N, K] filled with the weights of experts (integers [C]), in the dtype of out; returns out.

    The rows of an expert must be contiguous; experts need not be (a part of w13 is such a view).
    """
    _, outputs, inputs = weight.shape
    group = GROUP.get(weight.fmt, FP8_BLOCK)
    columns = min(512, max(group, triton.next_power_of_2(inputs)))
    rows = min(BLOCK // columns, triton.next_power_of_2(outputs))
    part = outputs // weight.parts  # FP8 blocks do not cross from gate to up
    packed, scale = weight.packed, weight.scale
    if weight.fmt != "bf16":
        packed, scale = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (packed, scale))
    _decode[(triton.cdiv(inputs, columns), triton.cdiv(outputs, rows), len(experts))](
        packed, scale, weight.global_scale, experts, out,
        packed.stride(0), 0 if scale is None else scale.stride(0), outputs, inputs, part,
        ROWS=rows, COLUMNS=columns, GROUP_SIZE=group, FMT=weight.fmt, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _decode(
    packed, scale, shared, experts, out, packed_stride, scale_stride, N, K, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP_SIZE: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    expert = tl.load(experts + tl.program_id(2)).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < N)[:, None] & (column < K)[None, :]
    stored = packed + expert * packed_stride
    if FMT == "bf16" or FMT == "fp8":
        value = tl.load(stored + row[:, None].to(tl.int64) * K + column[None, :], mask=live, other=0)
        if FMT == "fp8":
            value = value.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        half = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        inside = (row < N)[:, None] & (half < K // 2)[None, :]
        pairs = tl.load(stored + row[:, None].to(tl.int64) * (K // 2) + half[None, :], mask=inside, other=0)
        code = tl.join(pairs & 15, pairs >> 4).reshape(ROWS, COLUMNS).to(tl.int32)
        if FMT == "int4":
            value = (code - 8).to(tl.float32)
        else:  # the bits of a float32 number 2^126 times too small, zero and subnormal included; times 2^126 is exact
            value = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    if FMT != "bf16":
        group = tl.program_id(0) * (COLUMNS // GROUP_SIZE) + tl.arange(0, COLUMNS // GROUP_SIZE)
        groups = (K + GROUP_SIZE - 1) // GROUP_SIZE
        scale_row = row
        if FMT == "fp8":
            scale_row = row // part * ((part + GROUP_SIZE - 1) // GROUP_SIZE) + row % part // GROUP_SIZE
        where = expert * scale_stride + scale_row[:, None] * groups + group[None, :]
        factor = tl.load(scale + where, mask=(row < N)[:, None] & (group < groups)[None, :], other=0)
        if FMT == "mxfp4":  # byte 0 is 2^-127, a subnormal number, and byte 255 is NaN
            bits = factor.to(tl.int32) << 23
            bits = tl.where(factor == 0, 0x00400000, tl.where(factor == 255, 0x7FC00000, bits))
            factor = bits.to(tl.float32, bitcast=True)
        elif FMT == "nvfp4":
            number = factor.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            factor = tl.div_rn(number, tl.load(shared + expert).to(tl.float32) + tl.zeros_like(number))
        wide = factor.to(tl.float32)[:, :, None].broadcast_to(ROWS, COLUMNS // GROUP_SIZE, GROUP_SIZE)
        value = value * wide.reshape(ROWS, COLUMNS)
    target = out + (tl.program_id(2).to(tl.int64) * N + row[:, None]) * K + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=live)
