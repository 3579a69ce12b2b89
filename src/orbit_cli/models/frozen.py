"""Frozen linears and experts: what replaces nn.Linear and transformers' fused experts in the trainer's model.

They hold the base in its stored form (packed bytes and scales; unquantised weights in the compute dtype), have no
parameters, and hand their input to the adapter that is attached, if any. Left out: how bytes become numbers
(orbit_kernels) and where the bytes come from (build.py).

Shape letters: N outputs, K inputs, E experts, H hidden, I intermediate, T tokens, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.tensor import QuantizedTensor
from orbit_kernels.experts import ExpertAdapters, frozen_experts
from orbit_kernels.linear import frozen_linear


class LinearAdapter(Protocol):
    """What an adapted linear calls instead of itself."""

    def __call__(self, x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor: ...


class ExpertsAdapter(Protocol):
    """What adapted experts call at every forward: hidden states [T, H] -> what the experts get, and adapters of their
    own, if any. While adapters are off these are the hidden states themselves, and None."""

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, ExpertAdapters | None]: ...


class FrozenLinear(nn.Module):
    """y = x W^T + b with a frozen W [N, K]; gradients go to x and to the adapter only."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.has_bias = bias
        self.in_features = in_features
        self.out_features = out_features
        self.fmt = ""  # set by fill()
        self.adapter: LinearAdapter | None = None
        for name in ("weight", "scale", "global_scale", "bias"):
            self.register_buffer(name, None)

    def fill(self, value: QuantizedTensor | Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Take the weight: a QuantizedTensor as it is, a plain tensor [N, K] in the compute dtype."""
        if isinstance(value, QuantizedTensor):
            self.fmt = str(value.format)
            self.weight = own(value.packed, device)
            self.scale = own(value.scale, device)
            self.global_scale = None if value.global_scale is None else own(value.global_scale, device)
        else:
            self.fmt = "bf16"
            self.weight = own(value, device, dtype)

    @property
    def filled(self) -> bool:
        return self.weight is not None and (self.bias is not None) == self.has_bias

    def base(self, x: Tensor) -> Tensor:
        """The linear without its adapter."""
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        return frozen_linear(x, self.weight, self.scale, self.fmt, self.global_scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.adapter is None else self.adapter(x, self.base)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.fmt or 'empty'}"


class FrozenExperts(nn.Module):
    """Routed SwiGLU experts, stacked: w13 [E, 2I, ...] (gate rows first) and w2 [E, H, ...].

    Routers are frozen, and routing weights count as constants in the backward pass too: no gradient reaches the hidden
    states through them. This leaves out the part of the exact gradient that would move hidden states so as to shift
    the routing; the forward pass is exact.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.experts = experts
        self.hidden = hidden
        self.intermediate = intermediate
        self.fmt = ""
        self.path, self.chunk_bytes = "auto", 1 << 30  # as `frozen_experts` takes them
        self.adapter: ExpertsAdapter | None = None
        for name in ("w13", "w13_scale", "w13_global_scale", "w2", "w2_scale", "w2_global_scale"):
            self.register_buffer(name, None)
        self._seen: set[tuple[int, str]] = set()

    def fill(
        self, expert: int, projection: str, value: QuantizedTensor | Tensor, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Put one expert's gate_proj, up_proj or down_proj [N, K] in its place; the stacks are made at the first."""
        stack = "w2" if projection == "down_proj" else "w13"
        if isinstance(value, QuantizedTensor):
            fmt, pieces = str(value.format), {"": value.packed, "_scale": value.scale}
        else:
            fmt, pieces = "bf16", {"": value.to(dtype)}
        if self.fmt not in ("", fmt):
            raise CheckpointError(
                f"experts of one layer mix the formats {self.fmt} and {fmt}; store them in one format"
            )
        self.fmt = fmt
        for suffix, piece in pieces.items():
            self._place(stack + suffix, expert, projection, piece, device)
        if fmt == "nvfp4":
            self._place_global_scale(stack + "_global_scale", expert, projection, value.global_scale, device)
        self._seen.add((expert, projection))

    def _place(self, name: str, expert: int, projection: str, piece: Tensor, device: torch.device) -> None:
        """Rows of the weight, or of its scale (FP8: a row per 128 of the weight's, for gate and up each)."""
        halves = 1 if projection == "down_proj" else 2
        if getattr(self, name) is None:
            shape = (self.experts, halves * piece.shape[0], *piece.shape[1:])
            setattr(self, name, torch.zeros(shape, dtype=piece.dtype, device=device))
        start = piece.shape[0] if projection == "up_proj" else 0
        getattr(self, name)[expert, start : start + piece.shape[0]].copy_(piece)

    def _place_global_scale(self, name: str, expert: int, projection: str, value: Tensor, device: torch.device) -> None:
        if getattr(self, name) is None:
            setattr(self, name, torch.zeros(self.experts, dtype=value.dtype, device=device))
        stack = getattr(self, name)
        other = "up_proj" if projection == "gate_proj" else "gate_proj"
        if projection != "down_proj" and (expert, other) in self._seen and stack[expert] != value.item():
            raise CheckpointError(
                f"gate_proj and up_proj of expert {expert} have different NVFP4 global scales, but are multiplied as "
                "one matrix; quantise them with a shared global scale"
            )
        stack[expert] = value.reshape(())

    @property
    def filled(self) -> bool:
        return len(self._seen) == 3 * self.experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, k] int64, [T, k] -> [T, H]: the signature of transformers' fused experts."""
        adapter = None
        if self.adapter is not None:
            hidden_states, adapter = self.adapter(hidden_states)
        return frozen_experts(
            hidden_states,
            top_k_index,
            top_k_weights.detach(),
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            self.fmt,
            adapter,
            self.w13_global_scale,
            self.w2_global_scale,
            path=self.path,
            chunk_budget=self.chunk_bytes,
        )

    def extra_repr(self) -> str:
        return f"{self.experts} experts, {self.hidden} -> {self.intermediate} -> {self.hidden}, {self.fmt or 'empty'}"


def own(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy in this process's memory: never a view of the mapped checkpoint file."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device).copy_(tensor)
