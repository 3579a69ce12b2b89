"""Adapters on routed experts, one per expert and projection, at SGLang's FusedMoE method seam.

Per expert e and slot s: h = silu(gate_es(x)) * up_es(x), y = down_es(h), where each projection is rotated on its input
(OFT, 2306.07280) or has a low-rank sum (LoRA, 2106.09685). The router never sees an adapter. On a GPU a batch of mixed
versions is one call of orbit_kernels, whose row groups are (expert, slot) pairs (gpu_experts.py).

Shape letters: T tokens, k experts per token, E experts, H hidden, I intermediate, S slots, n blocks, b block, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orbit_cli.sglang_plugin.linear import Shard
from orbit_cli.sglang_plugin.room import AdapterRoom
from orbit_cli.sglang_plugin.rotation import rotate_rows
from orbit_cli.sglang_plugin.slots import BatchSlots

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class AdaptedExpertsMethod:
    """Wraps the quant method of one FusedMoE layer; every attribute it does not have is the wrapped method's."""

    def __init__(self, layer: nn.Module, path: str, room: AdapterRoom, slots: BatchSlots):
        if layer.moe_ep_size > 1:
            raise ValueError("adapter.expert_targets with expert parallelism is not served; use tensor parallelism")
        self.inner = layer.quant_method
        self.path, self.slots, self.experts = path, slots, layer.num_local_experts
        rank, width, hidden = layer.moe_tp_rank, layer.intermediate_size_per_partition, layer.hidden_size
        whole, part = Shard(0, hidden, hidden), Shard(rank * width, width, width * layer.moe_tp_size)
        self.inputs = {"gate_proj": whole, "up_proj": whole, "down_proj": part}
        self.outputs = {"gate_proj": part, "up_proj": part, "down_proj": whole}
        self.wanted = [name for name in PROJECTIONS if name in room.expert_targets]
        self.kinds = ["base"] * (room.versions + 1)
        self.scaling = [0.0] * (room.versions + 1)
        self.common_scaling = room.scaling
        where = {
            "dtype": layer.moe_runner_config.params_dtype or torch.get_default_dtype(),
            "device": next(layer.parameters()).device,
        }
        self._allocate(room, where)

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)

    def _allocate(self, room: AdapterRoom, where: dict) -> None:
        count, b, r = room.versions + 1, room.block_size, room.rank
        self.rotations: dict[str, Tensor] = {}  # [E, S, n, b, b]
        self.lora_a: dict[str, Tensor] = {}  # [E, S, r, in]
        self.lora_b: dict[str, Tensor] = {}  # [E, S, out, r]
        for name in self.wanted:
            inputs, outputs = self.inputs[name], self.outputs[name]
            if b and (inputs.size % b or inputs.start % b):
                raise ValueError(
                    f"{self.path}.*.{name} has {inputs.size} inputs on this rank; blocks of {b} do not divide them"
                )
            if b:
                eye = torch.eye(b, **where)
                self.rotations[name] = eye.expand(self.experts, count, inputs.size // b, b, b).contiguous()
            if r:
                self.lora_a[name] = torch.zeros(self.experts, count, r, inputs.size, **where)
                self.lora_b[name] = torch.zeros(self.experts, count, outputs.size, r, **where)

    # Filling and reading slots ------------------------------------------------------------------------------------

    def expected(self, kind: str, room: AdapterRoom) -> dict[str, tuple[int, ...]]:
        """Tensor names of all experts and their full shapes for one kind of adapter."""
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(self.experts):
            for name in self.wanted:
                path, full = f"{self.path}.{expert}.{name}", self.inputs[name].full
                if kind == "oft":
                    shapes[f"{path}.oft_R"] = (full // room.block_size, room.block_size, room.block_size)
                else:
                    shapes[f"{path}.lora_A"] = (room.rank, full)
                    shapes[f"{path}.lora_B"] = (self.outputs[name].full, room.rank)
        return shapes

    def _storage(self, slot: int):
        """(tensor name, storage view, slice of the full tensor's dimension, that dimension) of everything in a slot."""
        for expert in range(self.experts):
            for name in self.wanted:
                path, inputs, outputs = f"{self.path}.{expert}.{name}", self.inputs[name], self.outputs[name]
                if name in self.rotations:
                    b = self.rotations[name].shape[-1]
                    blocks = slice(inputs.start // b, (inputs.start + inputs.size) // b)
                    yield f"{path}.oft_R", self.rotations[name][expert, slot], blocks, 0
                if name in self.lora_a:
                    yield f"{path}.lora_A", self.lora_a[name][expert, slot], inputs.span, 1
                    yield f"{path}.lora_B", self.lora_b[name][expert, slot], outputs.span, 0

    def write(self, slot: int, kind: str, tensors: dict[str, Tensor], scaling: float) -> None:
        """Copy this rank's part of a version into a slot; an expert without tensors stays the identity."""
        if self.slots.on_gpu and kind == "lora" and scaling != self.common_scaling:
            raise ValueError(
                f"{self.path}: this version scales its LoRA by {scaling} where the engine was started for "
                f"{self.common_scaling}; start another engine for it"
            )
        self.clear(slot)
        for name, storage, span, dim in self._storage(slot):
            if name in tensors:
                storage.copy_(tensors[name][span] if dim == 0 else tensors[name][:, span])
                self.kinds[slot] = kind
                self.scaling[slot] = scaling if kind == "lora" else 0.0

    def clear(self, slot: int) -> None:
        """Make a slot the identity."""
        self.kinds[slot], self.scaling[slot] = "base", 0.0
        for rotations in self.rotations.values():
            own = rotations[:, slot]
            own.copy_(torch.eye(own.shape[-1], dtype=own.dtype, device=own.device).expand_as(own))
        for lora in (*self.lora_a.values(), *self.lora_b.values()):
            lora[:, slot].zero_()

    def held(self, slot: int, names: set[str]) -> dict[str, Tensor]:
        """This rank's part of the named tensors as it lies in a slot, back in bfloat16 (exact)."""
        return {name: view.to(torch.bfloat16) for name, view, _, _ in self._storage(slot) if name in names}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        for key, _, span, dim in self._storage(0):
            if key == name:
                return tensor[span] if dim == 0 else tensor[:, span]
        raise KeyError(name)

    # Multiplying --------------------------------------------------------------------------------------------------

    def apply(self, layer: nn.Module, dispatch_output):
        """SGLang's MoE method: routed tokens in, weighted sum of their experts out, [T, H]."""
        if self.slots.on_gpu:
            from orbit_cli.sglang_plugin.gpu_experts import run_experts

            return run_experts(layer, dispatch_output, self)
        uniform = self.slots.uniform
        if uniform is not None and self.kinds[uniform] == "base":
            return self.inner.apply(layer=layer, dispatch_output=dispatch_output)
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        groups = [(uniform, torch.arange(x.shape[0]))] if uniform is not None else self.slots.groups
        out = torch.empty_like(x)  # [T, H]
        for slot, rows in groups:
            part = self._run(layer, x[rows], topk.topk_ids[rows], topk.topk_weights[rows], slot)
            out.index_copy_(0, rows, part)
        return StandardCombineInput(hidden_states=out)

    def _run(self, layer: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, slot: int) -> Tensor:
        out = torch.zeros_like(x)  # [T, H]
        for expert in ids.unique().tolist():
            rows, choice = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = expert_weights(layer, expert, x.dtype)  # [2I, H], [H, I]
            gate, up = w13.chunk(2)
            tokens = x[rows]
            hidden = F.silu(self._project("gate_proj", tokens, gate, slot, expert))
            hidden = hidden * self._project("up_proj", tokens, up, slot, expert)
            y = self._project("down_proj", hidden, w2, slot, expert)
            out.index_add_(0, rows, y * weights[rows, choice].to(y.dtype).unsqueeze(1))
        return out

    def _project(self, name: str, x: Tensor, weight: Tensor, slot: int, expert: int) -> Tensor:
        kind = self.kinds[slot] if name in self.wanted else "base"
        if kind == "oft":
            return F.linear(rotate_rows(x, self.rotations[name][expert, slot].unsqueeze(2))[0], weight)
        out = F.linear(x, weight)
        if kind == "lora":
            down = F.linear(x, self.lora_a[name][expert, slot])  # [T, r]
            out.addmm_(down, self.lora_b[name][expert, slot].t(), alpha=self.scaling[slot])
        return out


def expert_weights(layer: nn.Module, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One expert's ([2I, H], [H, I]) in `dtype`, from plain weights or packed INT4 [E, N, K/2] uint8."""
    if not hasattr(layer, "w13_weight_packed"):
        return layer.w13_weight[expert], layer.w2_weight[expert]
    from orbit_kernels.decode import dequantize

    return (
        dequantize(layer.w13_weight_packed[expert], layer.w13_weight_scale[expert], "int4", dtype),
        dequantize(layer.w2_weight_packed[expert], layer.w2_weight_scale[expert], "int4", dtype),
    )
