"""The frozen-expert MLP with adapters as one differentiable operator on kernels: what `experts.frozen_experts` runs on.

Saved for backward: x, the routing (integers), x A^T [R, 2 r] if there is LoRA and, unless `recompute`, h = x W13^T
[R, 2 I]. Nothing of the base, no rotated or permuted copy of x, no activation a, no expert output. Backward forms a
from h again; with `recompute` h from x too, one more product. Gradients exist for x and the adapters; routing weights
count as constants (routers are frozen). Both passes are `torch.library` operators with fake implementations:
torch.compile and activation checkpointing see two calls.

Shape letters: T tokens, k slots, R = T k rows, E experts, H hidden, I intermediate, b block size, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orbit_kernels import lora
from orbit_kernels.chunked import BUDGET, chunked_product, fastest
from orbit_kernels.experts import ExpertAdapters, StackedAdapter
from orbit_kernels.grouped import PackedExperts, grouped_forward, grouped_input_gradient
from orbit_kernels.permute import combine_rows, gather_rows
from orbit_kernels.rotation import rotate_back, rotate_rows
from orbit_kernels.routing import Routing, Tiles, route, row_tiles
from orbit_kernels.swiglu import swiglu, swiglu_gradient

PROJECTIONS = ("gate", "up", "down")
TENSORS = ("rotation", "lora_a", "lora_b")


def expert_layer(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    adapter: ExpertAdapters | None = None,
    limit: float | None = None,
    recompute: bool = False,
    chunk_budget: int = 0,
) -> Tensor:
    """y [T, H] of x [T, H]; arguments as in `experts.frozen_experts`, checked there. `limit` clamps SwiGLU.

    With `chunk_budget` bytes the products go by way of decoded chunks (chunked.py) instead of the packed bytes.
    """
    stacks = [getattr(adapter, name) if adapter else None for name in PROJECTIONS]
    flat = [getattr(stack, name) if stack else None for stack in stacks for name in TENSORS]
    scalings = [stack.scaling if stack else 1.0 for stack in stacks]
    base = [w13.packed, w13.scale, w13.global_scale, w2.packed, w2.scale, w2.global_scale]
    return _forward_operator(
        x.contiguous(), expert_ids, weights, *base, w13.fmt, *flat, scalings, limit, recompute, chunk_budget
    )[0]


@torch.no_grad()
def fastest_path(
    x: Tensor, expert_ids: Tensor, weights: Tensor, w13: PackedExperts, w2: PackedExperts, cache: Path
) -> str:
    """ "kernels" or "chunked": whichever runs the base's forward faster at this size, from `cache` or by a trial."""
    if x.numel() == 0:
        return "kernels"
    size = 1 << (len(x) - 1).bit_length()
    key = f"{w13.fmt} {list(w13.shape)} {expert_ids.shape[1]} of {size} tokens"
    calls = {
        name: functools.partial(expert_layer, x, expert_ids, weights, w13, w2, chunk_budget=budget)
        for name, budget in (("kernels", 0), ("chunked", BUDGET))
    }
    return fastest(calls, key, cache, _milliseconds)


def _milliseconds(call: Callable[[], object]) -> float:
    """The second of two runs; the first compiles."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@torch.no_grad()
def serve_expert_layer(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    adapter: ExpertAdapters | None = None,
    token_slot: Tensor | None = None,
    slots: int = 1,
    limit: float | None = None,
) -> Tensor:
    """`expert_layer` for serving: tokens of several adapter versions in one call, no gradients.

    The adapter's stacks are [E * slots, ...], group expert * slots + slot; token_slot int32 [>= T] says which slot a
    token uses. Rows are sorted by (expert, slot), so the adapters see groups of one version while the products with the
    base run over whole experts. An id of -1 is a slot of padding: its output is undefined. A CUDA graph may capture it.
    """
    groups = expert_ids
    if slots > 1:
        groups = expert_ids * slots + token_slot[: x.shape[0], None].to(expert_ids.dtype)
    routing = route(groups, w13.shape[0] * slots)
    stacks = [(getattr(adapter, name) if adapter else None) or StackedAdapter() for name in PROJECTIONS]
    tiles = row_tiles(routing.offsets, routing.rows, lora.ROWS)
    layer = _Layer(w13, w2, *stacks, routing, tiles, limit, slots)
    h, _ = layer.hidden(x.contiguous())
    return layer.output(h, weights)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One call's tensors, under names."""

    w13: PackedExperts
    w2: PackedExperts
    gate: StackedAdapter
    up: StackedAdapter
    down: StackedAdapter
    routing: Routing
    tiles: Tiles
    limit: float | None
    groups: int = 1  # of `routing` per expert
    chunk_budget: int = 0

    @property
    def offsets(self) -> Tensor:
        """int32 [E + 1]: where each expert's rows begin."""
        return self.routing.offsets if self.groups == 1 else self.routing.offsets[:: self.groups].contiguous()

    def ordered(self, weight: PackedExperts) -> bool:
        """Whether `product` reads its rows in fragment order."""
        return weight.in_fragment_order and not self.chunk_budget

    def product(self, rows: Tensor, weight: PackedExperts, split: bool = False) -> Tensor:
        if self.chunk_budget:
            return chunked_product(rows, weight, self.offsets, split=split, budget=self.chunk_budget)
        return grouped_forward(rows, weight, self.offsets, split=split)

    def product_gradient(self, rows: Tensor, weight: PackedExperts, split: bool = False) -> Tensor:
        if self.chunk_budget:
            return chunked_product(rows, weight, self.offsets, gradient=True, split=split, budget=self.chunk_budget)
        return grouped_input_gradient(rows, weight, self.offsets, split=split)

    @property
    def split(self) -> bool:
        """Whether gate and up have inputs of their own."""
        return self.gate.rotation is not None or self.up.rotation is not None

    def turns(self) -> list[Tensor]:
        """The rotations of gate and up; one that is missing beside the other is the identity."""
        found = [stack.rotation for stack in (self.gate, self.up)]
        like = next(rotation for rotation in found if rotation is not None)
        identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)
        return [identity if rotation is None else rotation for rotation in found]

    def low_ranks(self) -> list[tuple[int, StackedAdapter]]:
        """(half of w13, adapter) of gate and up where there is LoRA."""
        return [(half, stack) for half, stack in enumerate((self.gate, self.up)) if stack.lora_a is not None]

    def hidden(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(h [R, 2 I] with the adapters of gate and up, low [R, 0, r or 2 r] = x A^T of those with LoRA)."""
        ordered = self.ordered(self.w13)
        if self.split:
            rows = rotate_rows(x, self.turns(), self.routing, gather=True, in_order=ordered)
        else:
            rows = gather_rows(x, self.routing, in_order=ordered)
        h = self.product(rows, self.w13, self.split)
        pairs = self.low_ranks()
        if not pairs:
            return h, x.new_empty(self.routing.rows, 0)
        stacked = torch.cat([stack.lora_a for _, stack in pairs], 1)  # one pass over x for both
        low = lora.project(x, stacked.transpose(1, 2), self.routing, gather=True, tiles=self.tiles)
        for (half, stack), own in zip(pairs, low.chunk(len(pairs), 1), strict=True):
            part = h.chunk(2, 1)[half]
            lora.expand(own, stack.lora_b.transpose(1, 2), self.routing, part, stack.scaling, self.tiles)
        return h, low

    def output(self, h: Tensor, weights: Tensor) -> Tensor:
        """y [T, H]."""
        ordered, down = self.ordered(self.w2), self.down
        plain = down.rotation is None and down.lora_a is None
        a = None if plain else swiglu(h, self.limit)
        if down.rotation is None:
            turned = swiglu(h, self.limit, ordered)
        else:
            turned = rotate_rows(a, [down.rotation], self.routing, in_order=ordered)[0]
        y = self.product(turned, self.w2)
        if down.lora_a is not None:
            low = lora.project(a, down.lora_a.transpose(1, 2), self.routing, tiles=self.tiles)
            lora.expand(low, down.lora_b.transpose(1, 2), self.routing, y, down.scaling, self.tiles)
        return combine_rows(y, self.routing, weights)

    def gradients(self, dy: Tensor, x: Tensor, h: Tensor, low: Tensor, weights: Tensor) -> list[Tensor | None]:
        """dx [T, H] and the gradients of rotation, lora_a, lora_b of gate, up and down."""
        da, down = self._through_down(gather_rows(dy, self.routing, weights), h)
        dh = swiglu_gradient(h, da, self.limit)  # [R, 2 I]
        del da
        dx_rows = self.product_gradient(dh, self.w13, self.split)  # [R, H] or [2, R, H]
        gate_up: list[Tensor | None] = [None] * 6
        if self.split:
            dx_rows, turns = rotate_back(x, dx_rows, self.turns(), self.routing, gather=True)
            for half, stack in enumerate((self.gate, self.up)):
                gate_up[3 * half] = None if stack.rotation is None else turns[half]
        pairs = self.low_ranks()
        if pairs:
            slopes = [dh.chunk(2, 1)[half] for half, _ in pairs]
            dlow = torch.cat(
                [
                    lora.project(slope, stack.lora_b, self.routing, scaling=stack.scaling, tiles=self.tiles)
                    for slope, (_, stack) in zip(slopes, pairs, strict=True)
                ],
                1,
            )
            stacked = torch.cat([stack.lora_a for _, stack in pairs], 1)
            lora.expand(dlow, stacked, self.routing, dx_rows, tiles=self.tiles)
            da_both = lora.outer(x, dlow, self.routing, stacked.dtype, gather=True, transpose=True)
            parts = zip(pairs, slopes, low.chunk(len(pairs), 1), da_both.chunk(len(pairs), 1), strict=True)
            for (half, stack), slope, own, slope_a in parts:
                slope_b = lora.outer(slope, own, self.routing, stack.lora_b.dtype, scaling=stack.scaling)
                gate_up[3 * half + 1 : 3 * half + 3] = [slope_a.contiguous(), slope_b]
        return [combine_rows(dx_rows, self.routing), *gate_up, *down]

    def _through_down(self, dy_rows: Tensor, h: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """da [R, I] and the gradients of down's adapter."""
        da, down = self.product_gradient(dy_rows, self.w2), self.down
        if down.rotation is None and down.lora_a is None:
            return da, [None, None, None]
        a, turn = swiglu(h, self.limit), None
        if down.rotation is not None:
            da, (turn,) = rotate_back(a, da.unsqueeze(0), [down.rotation], self.routing)
        if down.lora_a is None:
            return da, [turn, None, None]
        low = lora.project(a, down.lora_a.transpose(1, 2), self.routing, tiles=self.tiles)
        dlow = lora.project(dy_rows, down.lora_b, self.routing, scaling=down.scaling, tiles=self.tiles)
        lora.expand(dlow, down.lora_a, self.routing, da, tiles=self.tiles)
        slope_a = lora.outer(a, dlow, self.routing, down.lora_a.dtype, transpose=True)
        return da, [turn, slope_a, lora.outer(dy_rows, low, self.routing, down.lora_b.dtype, scaling=down.scaling)]


def _layer(base, fmt, flat, scalings, routing, limit, chunk_budget) -> _Layer:
    w13, w13_scale, w13_global, w2, w2_scale, w2_global = base
    stacks = [
        StackedAdapter(rotation=flat[3 * p], lora_a=flat[3 * p + 1], lora_b=flat[3 * p + 2], scaling=scalings[p])
        for p in range(3)
    ]
    return _Layer(
        PackedExperts(packed=w13, scale=w13_scale, fmt=fmt, global_scale=w13_global, parts=2),
        PackedExperts(packed=w2, scale=w2_scale, fmt=fmt, global_scale=w2_global),
        *stacks,
        routing,
        row_tiles(routing.offsets, routing.rows, lora.ROWS),
        limit,
        chunk_budget=chunk_budget,
    )


@torch.library.custom_op("orbit_kernels::expert_layer", mutates_args=())
def _forward_operator(
    x: Tensor, expert_ids: Tensor, weights: Tensor,
    w13: Tensor, w13_scale: Tensor | None, w13_global: Tensor | None,
    w2: Tensor, w2_scale: Tensor | None, w2_global: Tensor | None, fmt: str,
    gate_r: Tensor | None, gate_a: Tensor | None, gate_b: Tensor | None,
    up_r: Tensor | None, up_a: Tensor | None, up_b: Tensor | None,
    down_r: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    scalings: list[float], limit: float | None, recompute: bool, chunk_budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h or nothing, low of `_Layer.hidden`, and the routing's order, position and offsets)."""
    routing = route(expert_ids, w13.shape[0])
    flat = [gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b]
    base = (w13, w13_scale, w13_global, w2, w2_scale, w2_global)
    layer = _layer(base, fmt, flat, scalings, routing, limit, chunk_budget)
    h, low = layer.hidden(x)
    y = layer.output(h, weights)
    return y, x.new_empty(0, h.shape[1]) if recompute else h, low, routing.order, routing.position, routing.offsets


@_forward_operator.register_fake
def _(
    x, expert_ids, weights, w13, w13_scale, w13_global, w2, w2_scale, w2_global, fmt, gate_r, gate_a, gate_b, up_r,
    up_a, up_b, down_r, down_a, down_b, scalings, limit, recompute, chunk_budget,
):  # fmt: skip
    rows = expert_ids.numel()
    h = x.new_empty(0 if recompute else rows, w13.shape[1])
    low = x.new_empty(rows, sum(a.shape[1] for a in (gate_a, up_a) if a is not None))
    integers = [expert_ids.new_empty(shape, dtype=torch.int32) for shape in (rows, expert_ids.shape, w13.shape[0] + 1)]
    return torch.empty_like(x), h, low, *integers


@torch.library.custom_op("orbit_kernels::expert_layer_gradient", mutates_args=())
def _gradient_operator(
    dy: Tensor, x: Tensor, h: Tensor, low: Tensor, order: Tensor, position: Tensor, offsets: Tensor, weights: Tensor,
    w13: Tensor, w13_scale: Tensor | None, w13_global: Tensor | None,
    w2: Tensor, w2_scale: Tensor | None, w2_global: Tensor | None, fmt: str,
    gate_r: Tensor | None, gate_a: Tensor | None, gate_b: Tensor | None,
    up_r: Tensor | None, up_a: Tensor | None, up_b: Tensor | None,
    down_r: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    scalings: list[float], limit: float | None, chunk_budget: int,
) -> list[Tensor]:  # fmt: skip
    """dx and the gradients of those adapter tensors that exist, in the order of the arguments."""
    routing = Routing(order=order, position=position, offsets=offsets)
    flat = [gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b]
    base = (w13, w13_scale, w13_global, w2, w2_scale, w2_global)
    layer = _layer(base, fmt, flat, scalings, routing, limit, chunk_budget)
    hidden = layer.hidden(x)[0] if len(h) < routing.rows else h
    return [gradient for gradient in layer.gradients(dy, x, hidden, low, weights) if gradient is not None]


@_gradient_operator.register_fake
def _(
    dy, x, h, low, order, position, offsets, weights, w13, w13_scale, w13_global, w2, w2_scale, w2_global, fmt, gate_r,
    gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b, scalings, limit, chunk_budget,
):  # fmt: skip
    flat = [x, gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b]
    return [torch.empty_like(tensor) for tensor in flat if tensor is not None]


def _save(ctx, inputs, output) -> None:
    x, _, weights, *rest = inputs
    *tensors, scalings, limit, _, chunk_budget = rest
    base, fmt, flat = tensors[:6], tensors[6], tensors[7:]
    ctx.set_materialize_grads(False)  # h gets no gradient of its own; zeros for it would be a gigabyte
    ctx.fmt, ctx.settings = fmt, (scalings, limit, chunk_budget)
    ctx.save_for_backward(x, *output[1:], weights, *base, *flat)


def _backward(ctx, dy, *_):
    x, h, low, order, position, offsets, weights, *tensors = ctx.saved_tensors
    base, flat = tensors[:6], tensors[6:]
    if dy is None:  # only the integers were used
        return (None,) * 23
    found = _gradient_operator(
        dy.contiguous(), x, h, low, order, position, offsets, weights, *base, ctx.fmt, *flat, *ctx.settings
    )
    dx, *rest = found
    adapters = [None if tensor is None else rest.pop(0) for tensor in flat]
    return dx, None, None, *[None] * 7, *adapters, None, None, None, None


_forward_operator.register_autograd(_backward, setup_context=_save)
