"""SwiGLU between the grouped products: a = silu(gate) * up, optionally clamped, and its gradient.

With a limit c the gate is held below c and up within [-c, c] first (gpt-oss, DeepSeek-V4). Computed in float32 and
rounded once. Not Liger's kernel: ours reads gate and up as halves of one matrix and writes the column order that a
4-bit product reads, which saves a pass over the activations.

Shape letters: R rows, I columns of gate and of up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from orbit_kernels.fragments import fragment_order, in_fragment_order


def swiglu(h: torch.Tensor, limit: float | None = None, in_order: bool = False) -> torch.Tensor:
    """a [R, I] of h [R, 2 I], gate first; `in_order` as in `permute.gather_rows`."""
    rows, columns = h.shape[0], h.shape[1] // 2
    out = h.new_empty(rows, columns)
    if rows:
        grid, width = _grid(rows, columns)
        _forward[grid](
            h, out, rows, columns, limit or 0.0, CLAMPED=limit is not None, IN_ORDER=in_order, ROWS=4, WIDTH=width
        )
    return out


def swiglu_gradient(h: torch.Tensor, da: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """dh [R, 2 I] of h [R, 2 I] and da [R, I]; nothing flows through a clamped value."""
    rows, columns = da.shape
    out = torch.empty_like(h)
    if rows:
        grid, width = _grid(rows, columns)
        _backward[grid](h, da, out, rows, columns, limit or 0.0, CLAMPED=limit is not None, ROWS=4, WIDTH=width)
    return out


def swiglu_reference(h: torch.Tensor, limit: float | None = None, in_order: bool = False) -> torch.Tensor:
    """`swiglu` in PyTorch, in the dtype of h; autograd through it is the reference of `swiglu_gradient`."""
    gate, up = h.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    a = F.silu(gate) * up
    return a[:, fragment_order(a.shape[1], a.device)] if in_order else a


def _grid(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    width = min(512, max(32, triton.next_power_of_2(columns)))
    return (triton.cdiv(rows, 4), triton.cdiv(columns, width)), width


@triton.jit
def _forward(
    h, out, rows, columns, limit,
    CLAMPED: tl.constexpr, IN_ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    live = (row < rows) & (column < columns)
    gate = tl.load(h + row * 2 * columns + column, mask=live, other=0).to(tl.float32)
    up = tl.load(h + row * 2 * columns + columns + column, mask=live, other=0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    a = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    if IN_ORDER:
        a = in_fragment_order(a)
    tl.store(out + row * columns + column, a, mask=live)


@triton.jit
def _backward(h, da, out, rows, columns, limit, CLAMPED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    live = (row < rows) & (column < columns)
    raw_gate = tl.load(h + row * 2 * columns + column, mask=live, other=0).to(tl.float32)
    raw_up = tl.load(h + row * 2 * columns + columns + column, mask=live, other=0).to(tl.float32)
    slope = tl.load(da + row * columns + column, mask=live, other=0).to(tl.float32)
    gate, up = raw_gate, raw_up
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    sigmoid = tl.sigmoid(gate)
    d_gate = slope * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = slope * gate * sigmoid
    if CLAMPED:
        d_gate = tl.where(raw_gate <= limit, d_gate, 0)
        d_up = tl.where((raw_up >= -limit) & (raw_up <= limit), d_up, 0)
    tl.store(out + row * 2 * columns + column, d_gate.to(out.dtype.element_ty), mask=live)
    tl.store(out + row * 2 * columns + columns + column, d_up.to(out.dtype.element_ty), mask=live)
