"""Linear layers over frozen packed weights: in PyTorch for every device, by the grouped kernels on a GPU.

`frozen_linear` is what the trainer differentiates through: only x gets a gradient, nothing of the base is kept for the
backward pass but references to the packed bytes, and the weights are decoded a second time there. `PreparedLinear` is
for inference on a CPU, where memory is cheap and decoding each step is not. Adapters are elsewhere.

Shape letters: ... any leading dims of the activations, K inputs, N outputs, G scale groups along K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from orbit_kernels.checks import check_linear, stored_misfit
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
    BF16 activations on a GPU are multiplied by the stored bytes, in registers (grouped.py, one expert). Raises
    ValueError for shapes, dtypes and devices that do not fit each other (checks.py).
    """
    check_linear(x, packed, scale, fmt, global_scale, bias)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _forward(x, packed, scale, fmt, global_scale, bias)
    return _FrozenLinear.apply(x, packed, scale, fmt, global_scale, bias)


def _forward(x, packed, scale, fmt, global_scale, bias) -> torch.Tensor:
    stacked = _kernels_take(x, packed, scale, fmt, global_scale)
    if stacked is not None:
        return _packed_forward(x, stacked, bias)
    weight = dequantize(packed, scale, fmt, x.dtype, global_scale)  # [N, K]
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


class _FrozenLinear(torch.autograd.Function):
    """y = x W^T + b with dx = dy W. W lives only inside forward and inside backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, packed, scale, fmt, global_scale, bias):
        ctx.save_for_backward(packed, scale, global_scale)  # references, no copies
        ctx.fmt = fmt
        return _forward(x, packed, scale, fmt, global_scale, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output):
        packed, scale, global_scale = ctx.saved_tensors
        stacked = _kernels_take(grad_output, packed, scale, ctx.fmt, global_scale)
        if stacked is not None:
            return _packed_gradient(grad_output, stacked), None, None, None, None, None
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
        if misfit := stored_misfit(packed, scale, fmt, global_scale, experts=False):
            raise ValueError(misfit)
        with torch.no_grad():
            self.weight = dequantize(packed, scale, fmt, dtype, global_scale)  # [N, K]

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] = x [..., K] W^T + bias. The dtype of x must be the one given at preparation."""
        return F.linear(x, self.weight, bias)


class PackedLinear:
    """A frozen linear on a GPU: multiplies by the stored bytes, as `frozen_linear` does there, so with the same bits.

    Captured in CUDA graphs.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor | None,
        fmt: str,
        global_scale: torch.Tensor | None = None,
    ) -> None:
        from orbit_kernels.grouped import unsupported

        if misfit := stored_misfit(packed, scale, fmt, global_scale, experts=False):
            raise ValueError(misfit)
        self.weight = _stacked(packed, scale, fmt, global_scale)
        if reason := unsupported(self.weight):
            raise ValueError(f"this linear cannot be multiplied in its packed form: {reason}")

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y [..., N] = x [..., K] W^T + bias."""
        return _packed_forward(x, self.weight, bias)


def _kernels_take(x, packed, scale, fmt, global_scale):
    """The weight as the grouped kernels take it, or None where they do not run."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return None
    from orbit_kernels.grouped import unsupported

    stacked = _stacked(packed, scale, fmt, global_scale)
    return stacked if unsupported(stacked) is None else None


def _stacked(packed, scale, fmt, global_scale):
    """One linear as the only expert of a stack: what the grouped kernels take."""
    from orbit_kernels.grouped import PackedExperts

    lead = [None if t is None else t.unsqueeze(0) for t in (packed, scale)]
    return PackedExperts(
        packed=lead[0],
        scale=lead[1],
        fmt=fmt,
        global_scale=None if global_scale is None else global_scale.reshape(1),
    )


def _packed_forward(x: torch.Tensor, weight, bias: torch.Tensor | None) -> torch.Tensor:
    from orbit_kernels.fragments import fragment_order
    from orbit_kernels.grouped import forward_tile, grouped_forward

    rows = x.reshape(-1, x.shape[-1])
    if weight.in_fragment_order:
        rows = rows.index_select(1, _held(fragment_order, rows.shape[1], rows.device))
    offsets, tiles = _held(_one_group, len(rows), forward_tile(weight, len(rows)), rows.device)
    y = grouped_forward(rows.contiguous(), weight, offsets, tiles=tiles)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], y.shape[1])


def _packed_gradient(dy: torch.Tensor, weight) -> torch.Tensor:
    from orbit_kernels.grouped import grouped_input_gradient, token_tile

    rows = dy.reshape(-1, dy.shape[-1]).contiguous()
    offsets, tiles = _held(_one_group, len(rows), token_tile(len(rows), 1), rows.device)
    dx = grouped_input_gradient(rows, weight, offsets, tiles=tiles)
    return dx.view(*dy.shape[:-1], dx.shape[1])


def _one_group(rows: int, size: int, device: torch.device):
    """(int32 [2]: all rows belong to the one expert, their tiles of `size` rows); made on the device."""
    from orbit_kernels.routing import row_tiles

    offsets = torch.arange(2, dtype=torch.int32, device=device) * rows
    return offsets, row_tiles(offsets, rows, size)


def _held(make: Callable, *arguments):
    """make(*arguments), the last of which is the device, kept for the next call: outside a CUDA graph a small linear
    waits for the host, which would launch ten kernels for it. A graph being captured gets tensors of its own."""
    if arguments[-1].type != "cuda":
        return _kept(make, arguments, None)
    if torch.cuda.is_current_stream_capturing():
        return make(*arguments)
    return _kept(make, arguments, torch.cuda.current_stream(arguments[-1]).cuda_stream)


@functools.lru_cache(maxsize=256)
def _kept(make: Callable, arguments: tuple, stream: int | None):
    """By stream, since work on another would not wait for this one's."""
    with torch.inference_mode(False):
        return make(*arguments)
