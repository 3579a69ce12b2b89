"""SwiGLU between the grouped products: a = silu(gate) * up, optionally clamped, and its gradient.

With a limit c the gate is held below c and up within [-c, c] first (gpt-oss, DeepSeek-V4). Computed in float32 and
rounded once. Not Liger's kernel: ours reads gate and up as halves of one matrix and writes the column order that a
4-bit product reads, which saves a pass over the activations. Rotations of the down projection compute it on the way
(rotation.py), from the functions at the end of this file.

Shape letters: R rows, I columns of gate and of up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from orbit_kernels.chained import after_previous, chained
from orbit_kernels.fragments import fragment_order, in_fragment_order


def swiglu(h: torch.Tensor, limit: float | None = None, in_order: bool = False) -> torch.Tensor:
    """a [R, I] of h [R, 2 I], gate first; `in_order` as in `permute.gather_rows`."""
    rows, columns = h.shape[0], h.shape[1] // 2
    out = h.new_empty(rows, columns)
    if rows:
        grid, width = _grid(rows, columns)
        _forward[grid](
            h, out, rows, columns, limit or 0.0,
            CLAMPED=limit is not None, IN_ORDER=in_order, ROWS=4, WIDTH=width, **chained(),
        )  # fmt: skip
    return out


def swiglu_gradient(
    h: torch.Tensor,
    da: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None = None,
    *,
    dots: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    """dh [R, 2 I] of h [R, 2 I] and weights[row] * da, with da [R, I] and weights [R].

    Nothing flows through a clamped value. `dots` float32 [n, R], n as `dot_chunks`, receives <a, da> of each row: what
    the routing weight's gradient is, in n addends. `a` [R, I] receives swiglu(h).
    """
    rows, columns = da.shape
    out = torch.empty_like(h)
    if rows:
        grid, width = _grid(rows, columns)
        _backward[grid](
            h, da, out, weights, dots, a, rows, columns, limit or 0.0,
            CLAMPED=limit is not None, DOTS=dots is not None, KEEP=a is not None, ROWS=4, WIDTH=width,
        )  # fmt: skip
    return out


def dot_chunks(columns: int) -> int:
    """Addends of `swiglu_gradient`'s dots."""
    return _grid(1, columns)[0][1]


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


@triton.jit(do_not_specialize=["rows"])
def _forward(
    h, out, rows, columns, limit,
    CLAMPED: tl.constexpr, IN_ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    after_previous(CHAINED)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    live = (row < rows) & (column < columns)
    gate, up = load_hidden(h, row, column, columns, live)
    a = activation(gate, up, limit, CLAMPED).to(out.dtype.element_ty)
    if IN_ORDER:
        a = in_fragment_order(a)
    tl.store(out + row.to(tl.int64) * columns + column, a, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    h, da, out, weights, dots, kept, rows, columns, limit,
    CLAMPED: tl.constexpr, DOTS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = own[:, None]
    column = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    live = (row < rows) & (column < columns)
    gate, up = load_hidden(h, row, column, columns, live)
    slope = tl.load(da + row.to(tl.int64) * columns + column, mask=live, other=0).to(tl.float32)
    if DOTS or KEEP:
        a = activation(gate, up, limit, CLAMPED)
        if DOTS:
            tl.store(dots + tl.program_id(1).to(tl.int64) * rows + own, tl.sum(a * slope, 1), mask=own < rows)
        if KEEP:
            tl.store(kept + row.to(tl.int64) * columns + column, a.to(kept.dtype.element_ty), mask=live)
    weight = tl.load(weights + own, mask=own < rows, other=0).to(tl.float32)
    d_gate, d_up = activation_slopes(gate, up, slope * weight[:, None], limit, CLAMPED)
    store_hidden(out, row, column, columns, live, d_gate, d_up)


@triton.jit
def load_hidden(h, row, column, columns, live):
    """(gate, up) in float32 of h [R, 2 columns] at rows and columns that broadcast."""
    place = h + row.to(tl.int64) * 2 * columns + column
    gate = tl.load(place, mask=live, other=0).to(tl.float32)
    return gate, tl.load(place + columns, mask=live, other=0).to(tl.float32)


@triton.jit
def store_hidden(h, row, column, columns, live, gate, up):
    """The inverse of `load_hidden`."""
    place = h + row.to(tl.int64) * 2 * columns + column
    tl.store(place, gate.to(h.dtype.element_ty), mask=live)
    tl.store(place + columns, up.to(h.dtype.element_ty), mask=live)


@triton.jit
def activation(gate, up, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up in float32."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def activation_slopes(raw_gate, raw_up, slope, limit, CLAMPED: tl.constexpr):
    """Gradients of gate and up for the slope of their activation."""
    gate, up = raw_gate, raw_up
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = slope * up * (sigmoid + silu * (1 - sigmoid))
    d_up = slope * silu
    if CLAMPED:
        d_gate = tl.where(raw_gate <= limit, d_gate, 0)
        d_up = tl.where((raw_up >= -limit) & (raw_up <= limit), d_up, 0)
    return d_gate, d_up
