"""The frozen-expert MLP with adapters as one differentiable operator on kernels: what `experts.frozen_experts` runs on.

Saved for backward: x, the routing (integers), what every LoRA made of its rows [R, r] and, unless `recompute`, h = x
W13^T [R, 2 I]. Nothing of the base, no rotated or permuted copy of x, no activation a, no expert output. Backward forms
a from h again; with `recompute` h from x too, one more product. Gradients exist for x, the adapters and, if asked for,
the routing weights. Both passes are custom operators of PyTorch with fake implementations: torch.compile and activation
checkpointing see two calls. What the passes do is in expert_passes.py.

Shape letters: T tokens, k slots, R = T k rows, E experts, H hidden, I intermediate, b block size, r rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, library

from orbit_kernels import lora
from orbit_kernels.chunked import BUDGET, elapsed_ms, fastest
from orbit_kernels.expert_passes import Passes
from orbit_kernels.experts import ExpertAdapters, StackedAdapter
from orbit_kernels.grouped import PackedExperts, forward_tile
from orbit_kernels.leaves import exact_gradients
from orbit_kernels.permute import dispatch_rows
from orbit_kernels.routing import Routing, route

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
    routing_gradient: bool = False,
) -> Tensor:
    """y [T, H] of x [T, H]; arguments as in `experts.frozen_experts`, checked there. `limit` clamps SwiGLU.

    With `chunk_budget` bytes the products go by way of decoded chunks (chunked.py) instead of the packed bytes.
    """
    stacks = [getattr(adapter, name) if adapter else None for name in PROJECTIONS]
    flat = [getattr(stack, name) if stack else None for stack in stacks for name in TENSORS]
    scalings = [stack.scaling if stack else 1.0 for stack in stacks]
    base = [w13.packed, w13.scale, w13.global_scale, w2.packed, w2.scale, w2.global_scale]
    return _forward_operator(
        x.contiguous(), expert_ids, weights.contiguous(), *base, w13.fmt, *flat, scalings, limit, recompute,
        chunk_budget, routing_gradient, exact_gradients(flat),
    )[0]  # fmt: skip


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
    return elapsed_ms(call)


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
    stacks = [(getattr(adapter, name) if adapter else None) or StackedAdapter() for name in PROJECTIONS]
    x, rows = x.contiguous(), None
    if slots == 1 and all(stack.rotation is None and stack.lora_a is None for stack in stacks[:2]):
        size = forward_tile(w13, expert_ids.numel())
        routing, rows = dispatch_rows(x, expert_ids, w13.shape[0], size, w13.in_fragment_order)
    else:
        if slots > 1:
            expert_ids = expert_ids * slots + token_slot[: x.shape[0], None].to(expert_ids.dtype)
        routing = route(expert_ids, w13.shape[0] * slots)
    passes = Passes(w13, w2, *stacks, routing, limit, slots)
    h, _ = passes.hidden(x, rows)
    return passes.output(h, weights.contiguous())[0]


def _passes(base, fmt, flat, scalings, routing, limit, chunk_budget, exact=False) -> Passes:
    w13, w13_scale, w13_global, w2, w2_scale, w2_global = base
    stacks = [
        StackedAdapter(rotation=flat[3 * p], lora_a=flat[3 * p + 1], lora_b=flat[3 * p + 2], scaling=scalings[p])
        for p in range(3)
    ]
    return Passes(
        PackedExperts(packed=w13, scale=w13_scale, fmt=fmt, global_scale=w13_global, parts=2),
        PackedExperts(packed=w2, scale=w2_scale, fmt=fmt, global_scale=w2_global),
        *stacks,
        routing,
        limit,
        chunk_budget=chunk_budget,
        exact=exact,
    )


@library.custom_op("orbit_kernels::expert_layer", mutates_args=())
def _forward_operator(
    x: Tensor, expert_ids: Tensor, weights: Tensor,
    w13: Tensor, w13_scale: Tensor | None, w13_global: Tensor | None,
    w2: Tensor, w2_scale: Tensor | None, w2_global: Tensor | None, fmt: str,
    gate_r: Tensor | None, gate_a: Tensor | None, gate_b: Tensor | None,
    up_r: Tensor | None, up_a: Tensor | None, up_b: Tensor | None,
    down_r: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    scalings: list[float], limit: float | None, recompute: bool, chunk_budget: int, routing_gradient: bool,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h or nothing, low of `Passes.hidden` and of `Passes.output`, the routing's order, position and offsets)."""
    routing = route(expert_ids, w13.shape[0])
    flat = [gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b]
    base = (w13, w13_scale, w13_global, w2, w2_scale, w2_global)
    passes = _passes(base, fmt, flat, scalings, routing, limit, chunk_budget)
    h, low = passes.hidden(x)
    y, low_down = passes.output(h, weights)
    kept = x.new_empty(0, h.shape[1]) if recompute else h
    return y, kept, low, low_down, routing.order, routing.position, routing.offsets


@_forward_operator.register_fake
def _(
    x, expert_ids, weights, w13, w13_scale, w13_global, w2, w2_scale, w2_global, fmt, gate_r, gate_a, gate_b, up_r,
    up_a, up_b, down_r, down_a, down_b, scalings, limit, recompute, chunk_budget, routing_gradient, exact,
):  # fmt: skip
    rows = expert_ids.numel()
    h = x.new_empty(0 if recompute else rows, w13.shape[1])
    pair, down = [[a.shape[1] for a in own if a is not None] for own in ((gate_a, up_a), (down_a,))]
    low = x.new_empty(rows, 2 * lora.padded_rank(*pair) if pair else 0)
    low_down = x.new_empty(rows, lora.padded_rank(*down) if down else 0)
    integers = [expert_ids.new_empty(shape, dtype=torch.int32) for shape in (rows, expert_ids.shape, w13.shape[0] + 1)]
    return torch.empty_like(x), h, low, low_down, *integers


@library.custom_op("orbit_kernels::expert_layer_gradient", mutates_args=())
def _gradient_operator(
    dy: Tensor, x: Tensor, h: Tensor, low: Tensor, low_down: Tensor, order: Tensor, position: Tensor, offsets: Tensor,
    weights: Tensor,
    w13: Tensor, w13_scale: Tensor | None, w13_global: Tensor | None,
    w2: Tensor, w2_scale: Tensor | None, w2_global: Tensor | None, fmt: str,
    gate_r: Tensor | None, gate_a: Tensor | None, gate_b: Tensor | None,
    up_r: Tensor | None, up_a: Tensor | None, up_b: Tensor | None,
    down_r: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    scalings: list[float], limit: float | None, chunk_budget: int, routing_gradient: bool, exact: bool,
) -> list[Tensor]:  # fmt: skip
    """dx, if asked for that of weights, and those of the adapter tensors that exist, in the order of the arguments.

    Gradients of adapter tensors have their dtype, or float32 with `exact`.
    """
    routing = Routing(order=order, position=position, offsets=offsets)
    flat = [gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b]
    base = (w13, w13_scale, w13_global, w2, w2_scale, w2_global)
    passes = _passes(base, fmt, flat, scalings, routing, limit, chunk_budget, exact)
    hidden = passes.hidden(x)[0] if len(h) < routing.rows else h
    found = passes.gradients(dy, x, hidden, low, low_down, weights, routing_gradient)
    return [gradient for gradient in found if gradient is not None]


@_gradient_operator.register_fake
def _(
    dy, x, h, low, low_down, order, position, offsets, weights, w13, w13_scale, w13_global, w2, w2_scale, w2_global,
    fmt, gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b, scalings, limit, chunk_budget,
    routing_gradient, exact,
):  # fmt: skip
    flat = [gate_r, gate_a, gate_b, up_r, up_a, up_b, down_r, down_a, down_b]
    found = [torch.empty_like(t) for t in (x, weights if routing_gradient else None) if t is not None]
    return found + [torch.empty_like(t, dtype=torch.float32 if exact else t.dtype) for t in flat if t is not None]


def _save(ctx, inputs, output) -> None:
    x, _, weights, *rest = inputs
    *tensors, scalings, limit, _, chunk_budget, routing_gradient, exact = rest
    base, fmt, flat = tensors[:6], tensors[6], tensors[7:]
    ctx.set_materialize_grads(False)  # h gets no gradient of its own; zeros for it would be a gigabyte
    ctx.fmt, ctx.settings = fmt, (scalings, limit, chunk_budget, routing_gradient, exact)
    ctx.save_for_backward(x, *output[1:], weights, *base, *flat)


def _backward(ctx, dy, *_):
    x, h, low, low_down, order, position, offsets, weights, *tensors = ctx.saved_tensors
    base, flat = tensors[:6], tensors[6:]
    if dy is None:  # only the integers were used
        return (None,) * 25
    dx, *rest = _gradient_operator(
        dy.contiguous(), x, h, low, low_down, order, position, offsets, weights, *base, ctx.fmt, *flat, *ctx.settings
    )
    d_weights = rest.pop(0) if ctx.settings[3] else None
    adapters = [None if tensor is None else rest.pop(0) for tensor in flat]
    return dx, None, d_weights, *[None] * 7, *adapters, *[None] * 6


_forward_operator.register_autograd(_backward, setup_context=_save)
