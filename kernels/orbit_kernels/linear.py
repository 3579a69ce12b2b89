"""Linear layers over frozen packed weights, in PyTorch, for every device.

`frozen_linear` is what the trainer differentiates through: only x gets a gradient, nothing of the base is kept for the
backward pass but references to the packed bytes, and the weights are decoded a second time there. `PreparedLinear` is
for inference on a CPU, where memory is cheap and decoding each step is not. Adapters are elsewhere.

Shape letters: ... any leading dims of the activations, K inputs, N outputs, G scale groups along K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from orbit_kernels.decode import dequantize


def frozen_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: str,
    global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [..., N] = x [..., K] W^T + bias, with W [N, K] decoded from `packed` (see `orbit_kernels.decode.dequantize`).

    The dtype of x is the compute dtype: W is rounded to it once. Gradients exist for x alone; `bias` is frozen too.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        weight = dequantize(packed, scale, fmt, x.dtype, global_scale)  # [N, K]
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return _FrozenLinear.apply(x, packed, scale, fmt, global_scale, bias)


class _FrozenLinear(torch.autograd.Function):
    """y = x W^T + b with dx = dy W. W lives only inside forward and inside backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, packed, scale, fmt, global_scale, bias):
        ctx.save_for_backward(packed, scale, global_scale)  # references, no copies
        ctx.fmt = fmt
        weight = dequantize(packed, scale, fmt, x.dtype, global_scale)  # [N, K]
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output):
        packed, scale, global_scale = ctx.saved_tensors
        weight = dequantize(packed, scale, ctx.fmt, grad_output.dtype, global_scale)  # [N, K]
        return grad_output @ weight, None, None, None, None, None


class PreparedLinear:
    """A frozen linear prepared once for inference on a CPU: holds the decoded weight [N, K] in the compute dtype.

    Why a decoded copy, in milliseconds for 1536x576 in float32 on one AVX2 core (AMD EPYC, 24 layers in turn, so that
    no cache holds a weight; fastest of 60; torch 2.11):

        rows of x                          1      8      32     64     256
        decoded copy (this class)          0.37   0.68   1.5    2.2    11
        decode every time                  0.62   1.2    2.3    4.7    16
        aten._weight_int4pack_mm_for_cpu   2.2    37     146    291

    The cost is 4 bytes a weight in float32. The numbers are those of `dequantize`, so of the trainer.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor | None,
        fmt: str,
        global_scale: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        with torch.no_grad():
            self.weight = dequantize(packed, scale, fmt, dtype, global_scale)  # [N, K]

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] = x [..., K] W^T + bias. The dtype of x must be the one given at preparation."""
        return F.linear(x, self.weight, bias)
