"""Forward and backward of the frozen-expert MLP on kernels: which of them run in which order, for every adapter.

Rows travel in expert order, unweighted; a row's routing weight enters where its output is summed, and backward where
the slope of its activation is formed. LoRA joins the grouped products before their one rounding (grouped.LowRank),
except beside a rotation in the gradient, where the product's result is turned first.

Shape letters: T tokens, k slots, R = T k rows, E experts, H hidden, I intermediate, b block size, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_kernels import lora, rotation
from orbit_kernels.chunked import chunked_product
from orbit_kernels.experts import StackedAdapter
from orbit_kernels.grouped import (
    LowRank,
    PackedExperts,
    forward_tile,
    grouped_forward,
    grouped_input_gradient,
    token_tile,
)
from orbit_kernels.lora_sweep import project_gathered, sweep, sweeps
from orbit_kernels.permute import combine_rows, gather_rows
from orbit_kernels.routing import Routing, Tiles
from orbit_kernels.swiglu import dot_chunks, swiglu, swiglu_gradient


@dataclass(frozen=True, slots=True)
class Passes:
    """One call's tensors, under names."""

    w13: PackedExperts
    w2: PackedExperts
    gate: StackedAdapter
    up: StackedAdapter
    down: StackedAdapter
    routing: Routing
    limit: float | None
    groups: int = 1  # of `routing` per expert
    chunk_budget: int = 0
    exact: bool = False  # gradients of adapters in float32, whatever their dtype

    def hidden(self, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(h [R, 2 I] with the adapters of gate and up, their low [R, 2 r] = x A^T or [R, 0]).

        `rows` [R, H] are those of x, if no adapter is to see them and they are gathered already.
        """
        ordered, low = self._ordered(self.w13), None
        if self._split:
            rows = rotation.rotate_rows(x, self._turns(), self.routing, self.tiles, gather=True, in_order=ordered)
        if self._low_ranks:
            kept = x.new_empty(self.routing.rows, x.shape[1]) if rows is None else None
            low = project_gathered(
                x, self._pair("lora_a"), self._scalings, self.routing, self.tiles, out=kept, in_order=ordered
            )
            rows = kept if rows is None else rows
        elif rows is None:
            rows = gather_rows(x, self.routing, ordered)
        h = self._product(rows, self.w13, None if low is None else self._pair("lora_b"), low, self._split)
        return h, x.new_empty(self.routing.rows, 0) if low is None else low

    def output(self, h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(y [T, H], down's low [R, r] or [R, 0])."""
        ordered, down = self._ordered(self.w2), self.down
        rows, low, matrices = None, None, None
        if down.rotation is not None:
            rows = rotation.rotate_hidden(h, down.rotation, self.routing, self.tiles, self.limit, ordered)
        if rows is None or down.lora_a is not None:
            plain = swiglu(h, self.limit, ordered)
            rows = plain if rows is None else rows
        if down.lora_a is not None:
            a, b = self._down_pair()
            low = lora.project(plain, [a], [down.scaling], self.routing, self.tiles, ordered=ordered)
            matrices = (b,)
        y = combine_rows(self._product(rows, self.w2, matrices, low), self.routing, weights)
        return y, h.new_empty(self.routing.rows, 0) if low is None else low

    def gradients(
        self, dy: Tensor, x: Tensor, h: Tensor, low: Tensor, low_down: Tensor, weights: Tensor, routing_gradient: bool
    ) -> list[Tensor | None]:
        """dx [T, H], that of weights [T, k] or None, and those of rotation, lora_a, lora_b of gate, up and down."""
        row_weights = weights.reshape(-1).index_select(0, self.routing.order)
        da, dlow, down = self._into_down(dy, low_down, row_weights)
        dh, dots = self._through_activation(h, da, dlow, row_weights, down, routing_gradient)
        del da
        dlow, slopes = self._above(dh, low) if self._low_ranks else (None, None)
        matrices = None if dlow is None else self._pair("lora_a")
        dx = self._product_gradient(dh, self.w13, None if self._split else matrices, dlow, self._split)
        gate_up: list[Tensor | None] = [None] * 6
        if self._split:
            turns = self._turns()
            dx, turns = rotation.rotate_back(x, dx, turns, self.routing, gather=True, dtype=self._slope(turns[0]))
            for half, stack in enumerate((self.gate, self.up)):
                gate_up[3 * half] = None if stack.rotation is None else turns[half]
            if dlow is not None:
                for own, matrix in zip(dlow.chunk(2, 1), matrices, strict=True):
                    lora.expand(own, matrix, self.routing, dx, self.tiles)
        if dlow is not None:
            gate_up[1::3] = lora.outer(x, dlow, self.routing, *self._shapes("lora_a"), gather=True, transpose=True)
            gate_up[2::3] = slopes
        for half, stack in enumerate((self.gate, self.up)):
            if stack.lora_a is None:
                gate_up[3 * half + 1 : 3 * half + 3] = [None, None]
        d_weights = None
        if dots is not None:
            d_weights = dots.sum(0)[self.routing.position.long()].to(weights.dtype)
        return [combine_rows(dx, self.routing), d_weights, *gate_up, *down]

    def _into_down(self, dy: Tensor, low_down: Tensor, row_weights: Tensor):
        """(da [R, I] before the rotation's gradient, dlow [R, r] or None, gradients of down's adapter but dA, dR)."""
        down = self.down
        if down.lora_a is None:
            return self._product_gradient(gather_rows(dy, self.routing), self.w2), None, [None, None, None]
        a, b = self._down_pair()
        rows = dy.new_empty(self.routing.rows, dy.shape[1])
        arguments = (dy, [b], [down.scaling], self.routing)
        shapes, dtype = [down.lora_b.shape], self._slope(down.lora_b)
        if sweeps(self.routing, b.shape[2]):
            dlow, (slope,) = sweep(
                *arguments, gather=True, transposed=True, out=rows,
                low=low_down, shapes=shapes, dtype=dtype, weights=row_weights,
            )  # fmt: skip
        else:
            dlow = lora.project(*arguments, self.tiles, gather=True, transposed=True, out=rows)
            (slope,) = lora.outer(rows, low_down, self.routing, shapes, dtype, weights=row_weights)
        return (
            self._product_gradient(rows, self.w2, (a,) if down.rotation is None else None, dlow),
            dlow,
            [None, None, slope],
        )

    def _above(self, dh: Tensor, low: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(dlow [R, 2 r] of gate and up, the gradients of their lora_b)."""
        arguments, (shapes, dtype) = (dh, self._pair("lora_b"), self._scalings, self.routing), self._shapes("lora_b")
        if sweeps(self.routing, low.shape[1] // 2):
            return sweep(*arguments, wide_parts=True, transposed=True, low=low, shapes=shapes, dtype=dtype)
        dlow = lora.project(*arguments, self.tiles, wide_parts=True, transposed=True)
        return dlow, lora.outer(dh, low, self.routing, shapes, dtype, wide_parts=True)

    def _through_activation(self, h, da, dlow, row_weights, down: list, routing_gradient: bool):
        """(dh [R, 2 I], dots [n, R] or None); sets the gradients of down's rotation and lora_a."""

        def dots(count: int) -> Tensor | None:
            return h.new_empty(count, len(h), dtype=torch.float32) if routing_gradient else None

        turned, columns = self.down.rotation, da.shape[1]
        if turned is not None and dlow is None:
            found = dots(rotation.slabs(columns, turned.shape[-1]))
            dh, down[0] = rotation.rotate_hidden_back(
                h, da, turned, self.routing, row_weights, self.limit, found, self._slope(turned)
            )
            return dh, found
        if turned is not None:
            a = (swiglu(h, self.limit) * row_weights.unsqueeze(1)).to(h.dtype)
            da, (down[0],) = rotation.rotate_back(a, da.unsqueeze(0), [turned], self.routing, dtype=self._slope(turned))
            lora.expand(dlow, self._down_pair()[0], self.routing, da, self.tiles)
        found, a = dots(dot_chunks(columns)), None if dlow is None else torch.empty_like(da)
        dh = swiglu_gradient(h, da, row_weights, self.limit, dots=found, a=a)
        if dlow is not None:
            (down[1],) = lora.outer(
                a, dlow, self.routing, [self.down.lora_a.shape], self._slope(self.down.lora_a),
                transpose=True, weights=row_weights,
            )  # fmt: skip
        return dh, found

    @property
    def _split(self) -> bool:
        """Whether gate and up have inputs of their own."""
        return self.gate.rotation is not None or self.up.rotation is not None

    @property
    def _low_ranks(self) -> bool:
        """Whether gate or up has LoRA."""
        return self.gate.lora_a is not None or self.up.lora_a is not None

    @property
    def _scalings(self) -> list[float]:
        return [self.gate.scaling, self.up.scaling]

    def _turns(self) -> list[Tensor]:
        """The rotations of gate and up; one that is missing beside the other is the identity."""
        found = [stack.rotation for stack in (self.gate, self.up)]
        like = next(turn for turn in found if turn is not None)
        identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)
        return [identity if turn is None else turn for turn in found]

    def _pair(self, name: str) -> list[Tensor]:
        """lora_a or lora_b of gate and up, padded to one rank; one that is missing beside the other is zero."""
        dim = 1 if name == "lora_a" else 2
        found = [getattr(stack, name) for stack in (self.gate, self.up)]
        like = next(matrix for matrix in found if matrix is not None)
        found = [like.new_zeros(like.shape) if matrix is None else matrix for matrix in found]
        rank = lora.padded_rank(*(matrix.shape[dim] for matrix in found))
        return [lora.padded(matrix, dim, rank) for matrix in found]

    def _shapes(self, name: str) -> tuple[list[torch.Size], torch.dtype]:
        """Of lora_a or lora_b of gate and up; rank 0 for one that is missing."""
        found = [getattr(stack, name) for stack in (self.gate, self.up)]
        like = next(matrix for matrix in found if matrix is not None)
        empty = (len(like), 0, like.shape[2]) if name == "lora_a" else (*like.shape[:2], 0)
        return [torch.Size(empty) if matrix is None else matrix.shape for matrix in found], self._slope(like)

    def _slope(self, tensor: Tensor) -> torch.dtype:
        """Of an adapter tensor's gradient."""
        return torch.float32 if self.exact else tensor.dtype

    def _down_pair(self) -> tuple[Tensor, Tensor]:
        """lora_a [E, r, I] and lora_b [E, H, r] of down, padded."""
        rank = lora.padded_rank(self.down.lora_a.shape[1])
        return lora.padded(self.down.lora_a, 1, rank), lora.padded(self.down.lora_b, 2, rank)

    @property
    def tiles(self) -> Tiles:
        """Of the adapters' kernels: each has the matrices of one group."""
        return self.routing.tiles(lora.ROWS)

    @property
    def _offsets(self) -> Tensor:
        """int32 [E + 1]: where each expert's rows begin."""
        return self.routing.of_every(self.groups).offsets

    def _ordered(self, weight: PackedExperts) -> bool:
        """Whether `_product` reads its rows in fragment order."""
        return weight.in_fragment_order and not self.chunk_budget

    def _product(self, rows, weight: PackedExperts, matrices=None, low=None, split: bool = False) -> Tensor:
        """rows W^T + low matrices^T, with low [R, P r] and a matrix [E, N / P, r] for each part."""
        if self.chunk_budget:
            y = chunked_product(rows, weight, self._offsets, split=split, budget=self.chunk_budget)
            for part, matrix in enumerate(matrices or ()):
                own, to = low.chunk(len(matrices), 1)[part], y.chunk(len(matrices), 1)[part]
                lora.expand(own, matrix.transpose(1, 2), self.routing, to, self.tiles)
            return y
        size = forward_tile(weight, self.routing.rows)
        if matrices is None:
            whole = self.routing.of_every(self.groups)
            return grouped_forward(rows, weight, whole.offsets, split=split, tiles=whole.tiles(size))
        added, tiles = self._added(low, matrices), self.routing.tiles(size)  # a tile has matrices of one version
        return grouped_forward(
            rows, weight, self.routing.offsets, split=split, low=added, slots=self.groups, tiles=tiles
        )

    def _product_gradient(self, rows, weight: PackedExperts, matrices=None, low=None, split: bool = False) -> Tensor:
        """rows W + low matrices, with low [R, P r] and a matrix [E, r, K] for each part."""
        if self.chunk_budget:
            dx = chunked_product(rows, weight, self._offsets, gradient=True, split=split, budget=self.chunk_budget)
            for part, matrix in enumerate(matrices or ()):
                lora.expand(low.chunk(len(matrices), 1)[part], matrix, self.routing, dx, self.tiles)
            return dx
        added = None if matrices is None else self._added(low, matrices)
        tiles = self.routing.tiles(token_tile(self.routing.rows, weight.shape[0]))
        return grouped_input_gradient(rows, weight, self._offsets, split=split, low=added, tiles=tiles)

    @staticmethod
    def _added(low: Tensor, matrices) -> LowRank:
        """In the dtype of the products; float32 matrices count as holding bfloat16 values."""
        return LowRank(rows=low, matrices=tuple(matrix.to(low.dtype) for matrix in matrices))
