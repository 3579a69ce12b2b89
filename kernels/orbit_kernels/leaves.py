"""Adapter tensors as operands of products: BF16 numbers whose gradients are summed in float32.

A trainer holds what is multiplied in BF16 and asks for float32 gradients (`Tensor.grad_dtype`). A plain `.to(dtype)`
would round each gradient to BF16 on its way back to such a leaf; `operand` does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def operand(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`, itself if it is that already; a gradient through a wider copy comes back in float32."""
    if leaf.dtype == dtype:
        return leaf
    return _Widened.apply(leaf, dtype) if leaf.dtype.itemsize < dtype.itemsize else leaf.to(dtype)


def exact_gradients(leaves: list[Tensor | None]) -> bool:
    """Whether one of them asks for gradients in float32."""
    return any(leaf is not None and leaf.is_leaf and leaf.grad_dtype == torch.float32 for leaf in leaves)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        return leaf.to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.float(), None
