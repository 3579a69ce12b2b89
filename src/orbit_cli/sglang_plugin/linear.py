"""Adapters on SGLang's linear layers, at the seam that all of them share: `quant_method.apply(layer, x, bias)`.

The layer keeps its module, its parameter names and its base method, whatever the number format; only the method object
in `layer.quant_method` is wrapped. OFT rotates the method's input (2306.07280), LoRA adds to its output (2106.09685).
Tensor parallel: row-parallel layers hold their slice of the input blocks, column-parallel ones their rows of lora_B;
no collective is added. Left out: routed experts (experts.py) and the absorbed half of MLA (latent.py).

Shape letters: T tokens, K input, N output, P projections fused in the layer, S slots, n blocks, b block size, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orbit_cli.sglang_plugin.room import AdapterRoom
from orbit_cli.sglang_plugin.rotation import rotate_rows, rotate_slots
from orbit_cli.sglang_plugin.slots import BatchSlots

# SGLang's fused layers and the checkpoint's linears in them, in the order of their output rows.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one dimension."""

    start: int
    size: int
    full: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.size)


class AdaptedLinearMethod:
    """Wraps the quant method of one linear; every attribute it does not have is the wrapped method's."""

    def __init__(self, layer: nn.Module, path: str, room: AdapterRoom, slots: BatchSlots, sizes: list[int]):
        """`sizes` are this rank's output rows of each fused projection."""
        self.inner = layer.quant_method
        self.path = path
        self.slots = slots
        parent, leaf = path.rsplit(".", 1)
        self.projections = FUSED.get(leaf, (leaf,))
        self.names = [f"{parent}.{projection}" for projection in self.projections]
        self.inputs = _input_shard(layer)
        self.outputs = _output_shards(layer, sizes)  # per projection
        self.bounds = [0]
        for shard in self.outputs:
            self.bounds.append(self.bounds[-1] + shard.size)
        self.wanted = [projection in room.targets for projection in self.projections]
        self.serves_lora = True  # False where a low-rank sum could not be added in every form the layer takes
        self.pieces = _column_pieces(self.inner, layer, self.bounds)
        self._allocate(layer, room)

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)

    def _allocate(self, layer: nn.Module, room: AdapterRoom) -> None:
        where = {"dtype": layer.params_dtype, "device": next(layer.parameters()).device}
        count = room.versions + 1
        projections, k = len(self.projections), self.inputs.size
        self.rotations = self.eye = self.lora_a = None
        self.lora_b: list[Tensor] = []
        self.scaling = torch.zeros(count, **where)  # [S]; 0 in slots without a LoRA
        self.kinds = ["base"] * count  # what each slot holds
        if room.block_size:
            b = room.block_size
            if k % b or self.inputs.start % b:
                raise ValueError(
                    f"{self.path} has {k} inputs on this rank, which blocks of {b} do not divide; set "
                    "adapter.block_size to a divisor of every adapted linear's input"
                )
            self.eye = torch.eye(b, **where)
            self.rotations = self._rotation_storage(count, projections, k // b, b)  # [S, P, n, b, b]
            for slot in range(count):
                self.rotations[slot].copy_(self.eye.expand_as(self.rotations[slot]))
        if room.rank:
            self.lora_a = torch.zeros(count, projections, room.rank, k, **where)  # [S, P, r, K]
            self.lora_b = [
                torch.zeros(shard.size, count, room.rank, **where) for shard in self.outputs
            ]  # P x [N, S, r]

    def _rotation_storage(self, count: int, projections: int, n: int, b: int) -> Tensor:
        """[S, P, n, b, b]; on a CPU a view of [S, n, b, P, b], the layout of `rotate_rows`."""
        if self.slots.on_gpu:
            return self.eye.new_empty(count, projections, n, b, b)
        return self.eye.new_empty(count, n, b, projections, b).permute(0, 3, 1, 2, 4)

    # Filling and reading slots ------------------------------------------------------------------------------------

    def expected(self, kind: str, room: AdapterRoom) -> dict[str, tuple[int, ...]]:
        """Tensor names of this layer and their full (unsharded) shapes for one kind of adapter."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, wanted, out in zip(self.names, self.wanted, self.outputs, strict=True):
            if wanted and kind == "oft":
                b = room.block_size
                shapes[f"{name}.oft_R"] = (self.inputs.full // b, b, b)
            elif wanted and self.serves_lora:
                shapes[f"{name}.lora_A"] = (room.rank, self.inputs.full)
                shapes[f"{name}.lora_B"] = (out.full, room.rank)
        return shapes

    def _storage(self, slot: int):
        """(tensor name, storage view, slice of the full tensor's dimension, that dimension) of everything in a slot."""
        for p, name in enumerate(self.names):
            if self.rotations is not None and self.wanted[p]:
                b = self.rotations.shape[-1]
                blocks = slice(self.inputs.start // b, (self.inputs.start + self.inputs.size) // b)
                yield f"{name}.oft_R", self.rotations[slot, p], blocks, 0
            if self.lora_a is not None and self.wanted[p]:
                yield f"{name}.lora_A", self.lora_a[slot, p], self.inputs.span, 1
                yield f"{name}.lora_B", self.lora_b[p][:, slot], self.outputs[p].span, 0

    def write(self, slot: int, kind: str, tensors: dict[str, Tensor], scaling: float) -> None:
        """Copy this rank's part of a version into a slot; a projection without tensors stays the identity."""
        self.clear(slot)
        for name, storage, span, dim in self._storage(slot):
            if name in tensors:
                storage.copy_(tensors[name][span] if dim == 0 else tensors[name][:, span])
                self.kinds[slot] = kind
                self.scaling[slot] = scaling if kind == "lora" else 0.0

    def clear(self, slot: int) -> None:
        """Make a slot the identity."""
        self.kinds[slot] = "base"
        self.scaling[slot] = 0.0
        if self.rotations is not None:
            self.rotations[slot].copy_(self.eye.expand_as(self.rotations[slot]))
        if self.lora_a is not None:
            self.lora_a[slot].zero_()
            for lora_b in self.lora_b:
                lora_b[:, slot].zero_()

    def held(self, slot: int, names: set[str]) -> dict[str, Tensor]:
        """This rank's part of the named tensors as it lies in a slot, back in bfloat16 (exact: they came so)."""
        return {name: view.to(torch.bfloat16) for name, view, _, _ in self._storage(slot) if name in names}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        for key, _, span, dim in self._storage(0):
            if key == name:
                return tensor[span] if dim == 0 else tensor[:, span]
        raise KeyError(name)

    # Multiplying --------------------------------------------------------------------------------------------------

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output [T, N] for x [T, K], every token under its own slot."""
        if self.slots.on_gpu:
            return self._apply_slots(layer, x, bias)
        if self.slots.uniform is not None:
            return self._apply_slot(layer, x, bias, self.slots.uniform)
        out = x.new_empty(x.shape[0], self.bounds[-1])  # [T, N]
        for slot, rows in self.slots.groups:
            out.index_copy_(0, rows, self._apply_slot(layer, x.index_select(0, rows), bias, slot))
        return out

    def _apply_slot(self, layer: nn.Module, x: Tensor, bias: Tensor | None, slot: int) -> Tensor:
        kind = self.kinds[slot]
        if kind == "oft":
            return self._multiply(layer, list(rotate_rows(x, self.rotations[slot].permute(1, 2, 0, 3))), bias)
        out = self.inner.apply(layer, x, bias)
        if kind == "lora":
            down = F.linear(x, self.lora_a[slot].flatten(0, 1))  # [T, P*r]
            for p, part in enumerate(down.chunk(len(self.projections), dim=1)):
                columns = out[:, self.bounds[p] : self.bounds[p + 1]]
                columns.addmm_(part, self.lora_b[p][:, slot].t(), alpha=float(self.scaling[slot]))
        return out

    def _apply_slots(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        # No branch on what the batch holds: this is captured in CUDA graphs. Slot 0 is the identity, exactly.
        if self.rotations is None:
            out = self.inner.apply(layer, x, bias)
        else:
            rotated = rotate_slots(x.unsqueeze(1), self.rotations, self.slots.token_slot).squeeze(2)  # [P, T, K]
            out = self._multiply(layer, list(rotated), bias)
        if self.lora_a is not None:
            self._add_lora_slots(out, x)
        return out

    def _add_lora_slots(self, out: Tensor, x: Tensor) -> None:
        count, projections, rank, _ = self.lora_a.shape
        own = F.one_hot(self.slots.token_slot[: x.shape[0]].long(), count).to(x.dtype) * self.scaling  # [T, S]
        down = F.linear(x, self.lora_a.flatten(0, 2)).view(-1, count, projections, rank)  # [T, S, P, r]
        down = down * own[:, :, None, None]
        for p in range(projections):
            part = down[:, :, p].reshape(x.shape[0], count * rank)
            out[:, self.bounds[p] : self.bounds[p + 1]] += F.linear(part, self.lora_b[p].flatten(1))

    def _multiply(self, layer: nn.Module, inputs: list[Tensor], bias: Tensor | None) -> Tensor:
        """Each projection's columns from its own input; inputs P x [T, K] -> [T, N]."""
        if len(inputs) == 1:
            return self.inner.apply(layer, inputs[0], bias)
        spans = list(zip(self.bounds, self.bounds[1:], strict=False))
        if self.pieces is not None:
            outs = [
                piece(x, None if bias is None else bias[a:b])
                for piece, x, (a, b) in zip(self.pieces, inputs, spans, strict=True)
            ]
            return torch.cat(outs, dim=1)
        # The format does not let go of single rows: multiply all inputs by all rows and keep the diagonal parts.
        stacked = self.inner.apply(layer, torch.cat(inputs), bias).view(len(inputs), inputs[0].shape[0], -1)
        return torch.cat([stacked[p][:, a:b] for p, (a, b) in enumerate(spans)], dim=1)


def _input_shard(layer: nn.Module) -> Shard:
    size = getattr(layer, "input_size_per_partition", layer.input_size)
    rank = getattr(layer, "tp_rank", 0) if size != layer.input_size else 0
    return Shard(rank * size, size, layer.input_size)


def _output_shards(layer: nn.Module, sizes: list[int]) -> list[Shard]:
    """Each projection's output rows on this rank."""
    tp_size = getattr(layer, "tp_size", 1) if _column_parallel(layer) else 1
    rank = layer.tp_rank if tp_size > 1 else 0
    return [Shard(rank * size, size, size * tp_size) for size in sizes]


def _column_parallel(layer: nn.Module) -> bool:
    return hasattr(layer, "output_size_per_partition") and layer.output_size_per_partition != layer.output_size


def _column_pieces(inner, layer: nn.Module, bounds: list[int]):
    """One callable (x, bias) -> columns per projection, or None when the format cannot be cut by rows."""
    if len(bounds) == 2:
        return None
    prepared = getattr(layer, "orbit_pieces", None)
    if prepared is not None:
        return [piece.apply for piece in prepared]
    if type(inner).__name__ != "UnquantizedLinearMethod":
        return None
    weight = layer.weight.data

    def piece(a: int, b: int):
        return lambda x, bias: F.linear(x, weight[a:b], bias)

    return [piece(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
