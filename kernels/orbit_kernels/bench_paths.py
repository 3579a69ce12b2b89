"""What bench.py times: one expert MLP's products by each path, on the same random weights, rows and routing.

Shape letters: T tokens, k slots, R = T k rows, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_kernels.chunk_decode import decode_experts
from orbit_kernels.chunked import chunked_product
from orbit_kernels.decode import GROUP, dequantize
from orbit_kernels.expert_layer import expert_layer, serve_expert_layer
from orbit_kernels.experts import ExpertAdapters, StackedAdapter
from orbit_kernels.grouped import PackedExperts, decoded_expert, grouped_forward, grouped_input_gradient

CHUNK = 16
"""Experts decoded at a time by the eager path: 0.9 GiB of BF16 for Kimi's w13, several times that on the way."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Random rows and routing of one size."""

    x: Tensor  # [T, H]
    ids: Tensor  # int32 [T, k]
    weights: Tensor  # float32 [T, k]
    offsets: Tensor  # int32 [E + 1]
    hit: int  # experts with rows
    rows13: Tensor  # [R, H]
    rows2: Tensor  # [R, I]
    slopes13: Tensor  # [R, 2 I]
    slopes2: Tensor  # [R, H]

    def result_bytes(self, pass_: str) -> int:
        """Of what a pass gives back."""
        results = {
            "forward": (self.slopes13, self.slopes2), "gradient": (self.rows13, self.rows2), "mlp": (self.x,)
        }[pass_]  # fmt: skip
        return sum(t.nbytes for t in results)


@dataclass(frozen=True, slots=True)
class Problem:
    """Random weights of one layer, packed and as BF16."""

    w13: PackedExperts
    w2: PackedExperts
    dense13: Tensor  # [E, 2 I, H]
    dense2: Tensor  # [E, H, I]
    slots: int

    @staticmethod
    def random(experts: int, hidden: int, inter: int, slots: int, fmt: str) -> Problem:
        pair = [
            _random_weight(experts, *shape, fmt, parts)
            for shape, parts in (((2 * inter, hidden), 2), ((hidden, inter), 1))
        ]
        index = torch.arange(experts, device="cuda")
        dense = [decode_experts(w, index, torch.empty(w.shape, dtype=torch.bfloat16, device="cuda")) for w in pair]
        return Problem(*pair, *dense, slots)

    def batch(self, tokens: int) -> Batch:
        experts, hidden, inter = self.dense2.shape
        ids = torch.rand(tokens, experts, device="cuda").topk(self.slots, -1).indices
        counts = torch.bincount(ids.flatten(), minlength=experts)
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)
        rows = tokens * self.slots
        shapes = ((rows, hidden), (rows, inter), (rows, 2 * inter), (rows, hidden))
        matrices = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(tokens, self.slots, device="cuda")
        return Batch(x, ids.to(torch.int32), weights, offsets, int((counts > 0).sum()), *matrices)

    def bytes_moved(self, batch: Batch, pass_: str, dense: bool) -> int:
        """The bytes that a pass must read and write at least: weights of the experts hit, activations in and out.

        `layer` reads the weights twice and x, y, dx, dy once; adapters and what is kept for backward are not counted.
        """
        stored = [t for w in (self.w13, self.w2) for t in (w.packed, w.scale) if t is not None]
        weights = sum(t.nbytes for t in ((self.dense13, self.dense2) if dense else stored))
        weights = weights * batch.hit // len(self.dense2)
        if pass_ == "mlp":
            return weights + 2 * batch.x.nbytes
        if pass_ == "products":
            return self.bytes_moved(batch, "forward", dense) + self.bytes_moved(batch, "gradient", dense)
        if pass_ == "layer":
            return 2 * weights + 4 * batch.x.nbytes
        return weights + sum(t.nbytes for t in (batch.rows13, batch.rows2, batch.slopes13, batch.slopes2))


def ours(problem: Problem, batch: Batch, pass_: str) -> tuple[Tensor, Tensor]:
    """The kernels; for 4-bit formats the rows count as being in fragment order, which is where a layer writes them."""
    if pass_ == "forward":
        return (
            grouped_forward(batch.rows13, problem.w13, batch.offsets),
            grouped_forward(batch.rows2, problem.w2, batch.offsets),
        )
    return (
        grouped_input_gradient(batch.slopes13, problem.w13, batch.offsets),
        grouped_input_gradient(batch.slopes2, problem.w2, batch.offsets),
    )


def bf16_resident(problem: Problem, batch: Batch, pass_: str) -> tuple[Tensor, Tensor]:
    """`torch._grouped_mm` on decoded weights that stay in memory."""
    ends = batch.offsets[1:]
    if pass_ == "forward":
        return (
            torch._grouped_mm(batch.rows13, problem.dense13.transpose(1, 2), ends),
            torch._grouped_mm(batch.rows2, problem.dense2.transpose(1, 2), ends),
        )
    return (
        torch._grouped_mm(batch.slopes13, problem.dense13, ends),
        torch._grouped_mm(batch.slopes2, problem.dense2, ends),
    )


def chunked(problem: Problem, batch: Batch, pass_: str) -> list[Tensor]:
    """chunked.py with its default budget."""
    gradient = pass_ == "gradient"
    return [
        chunked_product(slopes if gradient else rows, weight, batch.offsets, gradient=gradient)
        for weight, rows, slopes in _sides(problem, batch)
    ]


def chunked_eager(problem: Problem, batch: Batch, pass_: str) -> list[Tensor]:
    """Decode CHUNK experts in PyTorch, multiply, next."""
    bounds = batch.offsets.tolist()
    results = []
    for weight, rows, slopes in _sides(problem, batch):
        source = rows if pass_ == "forward" else slopes
        pieces = []
        for first in range(0, len(bounds) - 1, CHUNK):
            last = min(first + CHUNK, len(bounds) - 1)
            shared = None if weight.global_scale is None else weight.global_scale[first:last]
            dense = dequantize(weight.packed[first:last], weight.scale[first:last], weight.fmt, torch.bfloat16, shared)
            ends = batch.offsets[first + 1 : last + 1] - bounds[first]
            own = source[bounds[first] : bounds[last]]
            pieces.append(torch._grouped_mm(own, dense.transpose(1, 2) if pass_ == "forward" else dense, ends))
        results.append(torch.cat(pieces))
    return results


def expert_loop(problem: Problem, batch: Batch, pass_: str) -> list[Tensor]:
    """Decode one expert in PyTorch, multiply, next."""
    return _one_by_one(problem, batch, pass_, lambda weight, expert: decoded_expert(weight, expert, torch.bfloat16))


def like_bitsandbytes(problem: Problem, batch: Batch, pass_: str) -> list[Tensor]:
    """The same with one kernel that decodes the expert, as bitsandbytes' 4-bit linears do in both directions."""
    index = torch.arange(len(problem.dense2), device="cuda")

    def decoded(weight: PackedExperts, expert: int) -> Tensor:
        out = torch.empty(1, *weight.shape[1:], dtype=torch.bfloat16, device="cuda")
        return decode_experts(weight, index[expert : expert + 1], out)[0]

    return _one_by_one(problem, batch, pass_, decoded)


def served(problem: Problem, batch: Batch) -> Tensor:
    """The whole MLP as the engine runs it: routing, both products, SwiGLU, weighted sum. y [T, H]."""
    return serve_expert_layer(batch.x, batch.ids, batch.weights, problem.w13, problem.w2)


def layer(problem: Problem, batch: Batch, adapter: str) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of the whole MLP with an adapter on all three projections of every expert."""
    experts, hidden, inter = problem.dense2.shape
    stacks = [
        _random_adapter(adapter, experts, *shape) for shape in ((hidden, inter), (hidden, inter), (inter, hidden))
    ]
    found = ExpertAdapters(gate=stacks[0], up=stacks[1], down=stacks[2])
    leaves = [t for s in stacks if s is not None for t in (s.rotation, s.lora_a, s.lora_b) if t is not None]
    x = batch.x.detach().requires_grad_()
    slope, weights = torch.randn_like(x), batch.weights.to(torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        y = expert_layer(x, batch.ids, weights, problem.w13, problem.w2, found)
        return torch.autograd.grad(y, [x, *leaves], slope)

    return run


def _sides(problem: Problem, batch: Batch) -> list[tuple[PackedExperts, Tensor, Tensor]]:
    return [(problem.w13, batch.rows13, batch.slopes13), (problem.w2, batch.rows2, batch.slopes2)]


def _one_by_one(
    problem: Problem, batch: Batch, pass_: str, decoded: Callable[[PackedExperts, int], Tensor]
) -> list[Tensor]:
    bounds = batch.offsets.tolist()
    results = []
    for weight, rows, slopes in _sides(problem, batch):
        source = rows if pass_ == "forward" else slopes
        pieces = []
        for expert in range(len(bounds) - 1):
            own = source[bounds[expert] : bounds[expert + 1]]
            if len(own):
                dense = decoded(weight, expert)
                pieces.append(own @ (dense.T if pass_ == "forward" else dense))
        results.append(torch.cat(pieces))
    return results


def _random_adapter(kind: str, experts: int, inputs: int, outputs: int) -> StackedAdapter | None:
    def leaf(*shape: int) -> Tensor:
        held = (torch.randn(shape, device="cuda") * 0.02).to(torch.bfloat16).requires_grad_()
        held.grad_dtype = torch.float32  # as a trainer's
        return held

    if kind == "oft32":
        return StackedAdapter(rotation=leaf(experts, inputs // 32, 32, 32))
    if kind == "lora16":
        return StackedAdapter(lora_a=leaf(experts, 16, inputs), lora_b=leaf(experts, outputs, 16))
    return None


def _random_weight(experts: int, outputs: int, inputs: int, fmt: str, parts: int) -> PackedExperts:
    if fmt == "bf16":
        packed, scale = torch.randn(experts, outputs, inputs, device="cuda").to(torch.bfloat16) * 0.02, None
    elif fmt == "fp8":
        packed = torch.randint(0, 256, (experts, outputs, inputs), dtype=torch.uint8, device="cuda")
        packed = (packed & 0x87 | 0x38).view(torch.float8_e4m3fn)  # of either sign, between 1 and 2
        scale = torch.rand(experts, outputs // 128, inputs // 128, device="cuda") * 0.02
    else:
        packed = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8, device="cuda")
        size = (experts, outputs, inputs // GROUP[fmt])
        scale = {
            "int4": lambda: (torch.rand(size, device="cuda") * 0.004 + 0.002).to(torch.bfloat16),
            "mxfp4": lambda: torch.randint(115, 121, size, device="cuda", dtype=torch.uint8),
            "nvfp4": lambda: torch.randint(40, 60, size, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn),
        }[fmt]()
    shared = torch.full((experts,), 200.0, device="cuda") if fmt == "nvfp4" else None
    return PackedExperts(packed=packed, scale=scale, fmt=fmt, global_scale=shared, parts=parts)
