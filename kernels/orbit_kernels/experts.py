"""Routed SwiGLU experts over frozen packed weights: the one entry, and the PyTorch reference for every device.

On a GPU `frozen_experts` runs on the kernels of expert_layer.py. In the reference tokens are sorted by expert and each
expert that was hit runs once over its rows; a token's top-k results are summed in slot order. Gradients reach x, the
adapter's tensors and, if asked for, the routing weights. Adapters are given as tensors: what they
mean and how they are trained is `orbit_cli.adapters`' business.

Shape letters: T tokens, k experts per token, R rows of one expert, E experts, H hidden size, I intermediate size,
b block size of a rotation, r LoRA rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from orbit_kernels.checks import check_experts, check_range
from orbit_kernels.leaves import operand
from orbit_kernels.linear import frozen_linear

PATHS = ("auto", "kernels", "chunked", "fastest", "reference")
PATH_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orbit" / "expert_paths.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionAdapter:
    """The adapter of one projection of one expert: a rotation of its input, or a low-rank sum, or both."""

    rotation: torch.Tensor | None = None  # [K/b, b, b]; y = (x R) W^T (OFT, 2306.07280)
    lora_a: torch.Tensor | None = None  # [r, K]
    lora_b: torch.Tensor | None = None  # [N, r]; y += scaling * (x A^T) B^T
    scaling: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedAdapter:
    """The adapters of one projection of all experts, stacked along a leading E. Fields as in ProjectionAdapter."""

    rotation: torch.Tensor | None = None  # [E, K/b, b, b]
    lora_a: torch.Tensor | None = None  # [E, r, K]
    lora_b: torch.Tensor | None = None  # [E, N, r]
    scaling: float = 1.0

    def per_expert(self, dtype: torch.dtype) -> list[ProjectionAdapter]:
        """One entry per expert, in `dtype`. Unbinding once makes the gradient one stack instead of E padded copies."""
        stacks = [None if t is None else operand(t, dtype) for t in (self.rotation, self.lora_a, self.lora_b)]
        count = next(len(stack) for stack in stacks if stack is not None)
        rows = zip(*([None] * count if stack is None else stack.unbind(0) for stack in stacks), strict=True)
        return [ProjectionAdapter(rotation=r, lora_a=a, lora_b=b, scaling=self.scaling) for r, a, b in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertAdapters:
    """The adapters of a layer's experts; None leaves a projection as it is."""

    gate: StackedAdapter | None = None  # K = H, N = I
    up: StackedAdapter | None = None  # K = H, N = I
    down: StackedAdapter | None = None  # K = I, N = H


def frozen_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor | None,
    fmt: str,
    adapter: ExpertAdapters | None = None,
    w13_global_scale: torch.Tensor | None = None,
    w2_global_scale: torch.Tensor | None = None,
    path: str = "auto",
    chunk_budget: int = 1 << 30,
    routing_gradient: bool = False,
) -> torch.Tensor:
    """y [T, H] = sum over slots j of weights[t, j] * expert(expert_ids[t, j])(x[t]).

    x [T, H]; expert_ids [T, k] integers; weights [T, k]; w13 [E, 2I, ...] with the gate rows first; w2 [E, H, ...],
    packed and scaled as `orbit_kernels.decode.dequantize` says. With `routing_gradient` weights get a gradient too,
    else they are constants. No tokens make [0, H] and zero gradients. Raises ValueError for shapes, dtypes and devices
    that do not fit each other (checks.py) and for a path that cannot run; for ids that are no experts of the layer
    wherever the ids pass by the host, which is everywhere but in the kernels on a GPU: there they are undefined.

    path       kernels    products straight from the packed bytes; BF16 on a GPU
               chunked    decoded chunks of at most `chunk_budget` bytes; BF16 on a GPU
               fastest    one of these two, tried once per device and size and remembered in PATH_CACHE
               reference  PyTorch, any device and dtype; sums in the dtype of x
               auto       kernels on a GPU where they can run, else the reference
    """
    stored = (w13_packed, w13_scale, w13_global_scale), (w2_packed, w2_scale, w2_global_scale)
    check_experts(x, expert_ids, weights, *stored, fmt, adapter)
    weights = weights if routing_gradient else weights.detach()
    if path not in PATHS:
        raise ValueError(f"path={path!r} is none of {', '.join(PATHS)}")
    if path in ("kernels", "chunked", "fastest") or (path == "auto" and x.is_cuda):
        from orbit_kernels.expert_layer import expert_layer, fastest_path  # Triton is imported where it is used
        from orbit_kernels.grouped import COMPUTE, INTERPRETED, PackedExperts, unsupported

        w13 = PackedExperts(packed=w13_packed, scale=w13_scale, fmt=fmt, global_scale=w13_global_scale, parts=2)
        w2 = PackedExperts(packed=w2_packed, scale=w2_scale, fmt=fmt, global_scale=w2_global_scale)
        reason = unsupported(w13) or unsupported(w2)
        if reason is None and x.dtype != COMPUTE:
            reason = f"x is {x.dtype}; the kernels multiply {COMPUTE}, convert it"
        if reason is not None and path != "auto":
            raise ValueError(f"path={path!r} cannot run: {reason}, or pass path='auto' or 'reference'")
        if reason is None and len(x):
            if INTERPRETED:
                check_range(*(int(bound) for bound in expert_ids.aminmax()), len(w2_packed))
            if path == "fastest":
                path = fastest_path(x, expert_ids, weights.detach(), w13, w2, PATH_CACHE)
            budget = chunk_budget if path == "chunked" else 0
            return expert_layer(
                x, expert_ids, weights, w13, w2, adapter, chunk_budget=budget, routing_gradient=routing_gradient
            )
    if not len(x):
        return _no_tokens(x, weights, adapter)
    tokens, slots = expert_ids.shape
    order, hit, counts = sort_by_expert(expert_ids)  # order [T*k]
    check_range(hit[0], hit[-1], len(w2_packed))
    rows = x.index_select(0, torch.div(order, slots, rounding_mode="floor"))  # [T*k, H], grouped by expert
    gates, ups, downs = (_per_expert(adapter, name, x.dtype) for name in ("gate", "up", "down"))
    outputs = [
        expert_mlp(
            chunk,
            w13_packed[expert],
            _row(w13_scale, expert),
            w2_packed[expert],
            _row(w2_scale, expert),
            fmt,
            gate_adapter=gates[expert] if gates else None,
            up_adapter=ups[expert] if ups else None,
            down_adapter=downs[expert] if downs else None,
            w13_global_scale=_row(w13_global_scale, expert),
            w2_global_scale=_row(w2_global_scale, expert),
        )
        for expert, chunk in zip(hit, rows.split(counts), strict=True)
    ]
    return combine_slots(torch.cat(outputs), order, weights, tokens)


def _no_tokens(x: torch.Tensor, weights: torch.Tensor, adapter: ExpertAdapters | None) -> torch.Tensor:
    """y [0, H], of which everything that may be trained has a gradient of zeros: the same graph as with tokens."""
    stacks = [] if adapter is None else [s for s in (adapter.gate, adapter.up, adapter.down) if s is not None]
    leaves = [weights, *(t for s in stacks for t in (s.rotation, s.lora_a, s.lora_b) if t is not None)]
    return x + sum(leaf[:0].sum() for leaf in leaves)


def sort_by_expert(expert_ids: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    """(order [T*k] that sorts the flat slots by expert and keeps token order, experts hit, rows of each)."""
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
    return order, hit.tolist(), counts.tolist()


def combine_slots(grouped: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, tokens: int) -> torch.Tensor:
    """y [T, H] from rows [T*k, H] in the order of `sort_by_expert`: weighted, summed over slots 0..k-1 in turn."""
    slots = weights.shape[-1]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    by_slot = grouped.index_select(0, inverse).view(tokens, slots, grouped.shape[-1])  # [T, k, H]
    weighted = by_slot * weights.to(grouped.dtype).unsqueeze(-1)
    return sum(weighted.unbind(1)[1:], start=weighted[:, 0])


def expert_mlp(
    rows: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor | None,
    fmt: str,
    gate_adapter: ProjectionAdapter | None = None,
    up_adapter: ProjectionAdapter | None = None,
    down_adapter: ProjectionAdapter | None = None,
    w13_global_scale: torch.Tensor | None = None,
    w2_global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """One expert: y [R, H] = (silu(gate(x)) * up(x)) W2^T for x [R, H]; w13 [2I, ...] (gate rows first), w2 [H, ...].

    FP8: gate and up have their own scale blocks, so w13_scale has 2 * ceil(I/128) rows.
    """
    if fmt == "fp8" or _rotated(gate_adapter) or _rotated(up_adapter):
        halves = zip(w13_packed.chunk(2), _halve(w13_scale), (gate_adapter, up_adapter), strict=True)
        gate, up = (
            frozen_linear(_rotate(rows, adapter), packed, scale, fmt, w13_global_scale)
            for packed, scale, adapter in halves
        )  # each [R, I]
    else:
        gate, up = frozen_linear(rows, w13_packed, w13_scale, fmt, w13_global_scale).chunk(2, -1)
    hidden = F.silu(_add_lora(gate, rows, gate_adapter)) * _add_lora(up, rows, up_adapter)  # [R, I]
    output = frozen_linear(_rotate(hidden, down_adapter), w2_packed, w2_scale, fmt, w2_global_scale)  # [R, H]
    return _add_lora(output, hidden, down_adapter)


def rotate_blocks(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x [R, K] times a block-diagonal matrix given as its blocks [K/b, b, b]."""
    blocks = x.reshape(x.shape[0], *rotation.shape[:2]).transpose(0, 1)  # [K/b, R, b]
    return torch.bmm(blocks, operand(rotation, x.dtype)).transpose(0, 1).reshape(x.shape)


def _rotated(adapter: ProjectionAdapter | None) -> bool:
    return adapter is not None and adapter.rotation is not None


def _rotate(x: torch.Tensor, adapter: ProjectionAdapter | None) -> torch.Tensor:
    return rotate_blocks(x, adapter.rotation) if _rotated(adapter) else x


def _add_lora(y: torch.Tensor, x: torch.Tensor, adapter: ProjectionAdapter | None) -> torch.Tensor:
    """y [R, N] + scaling * (x A^T) B^T (2106.09685); y itself where there is no LoRA."""
    if adapter is None or adapter.lora_a is None:
        return y
    low_rank = F.linear(F.linear(x, operand(adapter.lora_a, x.dtype)), operand(adapter.lora_b, x.dtype))
    return y + adapter.scaling * low_rank


def _per_expert(adapter: ExpertAdapters | None, name: str, dtype: torch.dtype) -> Sequence[ProjectionAdapter] | None:
    stacked = getattr(adapter, name) if adapter is not None else None
    return stacked.per_expert(dtype) if stacked is not None else None


def _halve(scale: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if scale is None else scale.chunk(2)


def _row(stack: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if stack is None else stack[expert]
