"""Multiplying tokens by their slot's block-diagonal rotation: y = x blockdiag(R), 2306.07280.

`rotate_rows` is the CPU path (one slot, batched matrix product); `rotate_slots` is the GPU path, one Triton kernel that
looks up each token's slot, with a PyTorch reference of the same signature. The rotations arrive finished: nothing here
knows how R comes about.

Shape letters: T tokens, H heads (1 for a plain linear), P projections, S slots, n blocks, b block size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate_rows(x: Tensor, rotations: Tensor) -> Tensor:
    """x [T, n*b] times P rotations that share their input, [n, b, P, b] -> [P, T, n*b], in x's dtype.

    One batched product for all projections; the layout puts a block's P rotations side by side.
    """
    n, b, p, _ = rotations.shape
    blocks = x.reshape(x.shape[0], n, b).transpose(0, 1)  # [n, T, b]
    turned = torch.bmm(blocks, rotations.reshape(n, b, p * b)).view(n, -1, p, b)  # [n, T, P, b]
    return turned.permute(2, 1, 0, 3).reshape(p, -1, n * b)


def rotate_slots_reference(x: Tensor, rotations: Tensor, token_slot: Tensor, transpose: bool = False) -> Tensor:
    """PyTorch twin of `rotate_slots`, in the tensors' own precision."""
    own = rotations[token_slot[: x.shape[0]].long()]  # [T, P, n, b, b]
    if transpose:
        own = own.transpose(-1, -2)
    blocks = x.reshape(x.shape[0], x.shape[1], own.shape[2], own.shape[3])  # [T, H, n, b]
    return torch.einsum("thnk,tpnkc->pthnc", blocks, own).reshape(own.shape[1], *x.shape)


def rotate_slots(x: Tensor, rotations: Tensor, token_slot: Tensor, transpose: bool = False) -> Tensor:
    """Rotate every token by its own slot's rotations.

    x [T, H, n*b] (last dimension contiguous), rotations [S, P, n, b, b], token_slot int32 [>= T] ->
    [P, T, H, n*b] in x's dtype, summed in float32. `transpose` multiplies by R^T. b must be a power of two >= 16.
    """
    s, p, n, b, _ = rotations.shape
    t, h, _ = x.shape
    out = torch.empty(p, t, h, n * b, dtype=x.dtype, device=x.device)  # [P, T, H, n*b]
    if t == 0:
        return out
    rows = 16 if t <= 64 else 64
    _rotate_slots_kernel[(n, triton.cdiv(t, rows), p * h)](
        x, rotations, token_slot, out, t, x.stride(0), x.stride(1),
        N=n, B=b, P=p, S=s, H=h, ROWS=rows, TRANSPOSE=transpose, num_warps=1 if rows == 16 else 4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rotate_slots_kernel(
    x, r, slot, out, tokens, stride_t, stride_h,
    N: tl.constexpr, B: tl.constexpr, P: tl.constexpr, S: tl.constexpr, H: tl.constexpr,
    ROWS: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(2) // H
    h = tl.program_id(2) % H
    live = t < tokens
    k = tl.arange(0, B)
    t64 = t[:, None].to(tl.int64)
    xb = tl.load(x + t64 * stride_t + h * stride_h + (n * B + k)[None, :], mask=live[:, None], other=0.0)
    mine = tl.load(slot + t, mask=live, other=-1)
    acc = tl.zeros((ROWS, B), dtype=tl.float32)
    for s in tl.static_range(S):
        hit = mine == s
        if tl.max(hit.to(tl.int32), 0) > 0:
            base = r + ((s * P + p) * N + n) * B * B
            block = (
                tl.load(base + k[None, :] * B + k[:, None])
                if TRANSPOSE
                else tl.load(base + k[:, None] * B + k[None, :])
            )
            acc = tl.where(hit[:, None], tl.dot(xb, block, input_precision="ieee"), acc)
    where = ((p * tokens + t64) * H + h) * (N * B) + (n * B + k)[None, :]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=live[:, None])
