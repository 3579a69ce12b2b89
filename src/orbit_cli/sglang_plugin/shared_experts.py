"""One rotation that all routed experts of a layer share, at SGLang's FusedMoE method seam.

For a token x in slot s every expert gets x R_s (2306.07280); which experts, the router says from x itself, and shared
experts get x. So the experts are the base's, whatever their number format and kernel: what is turned is their input.
Every tensor-parallel rank has whole tokens, and holds the whole rotation. Left out: adapters of single experts
(experts.py).

Shape letters: T tokens, H hidden, S slots, n blocks, b block size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orbit_cli.adapters.sites import SHARED_PROJECTION
from orbit_cli.sglang_plugin.room import AdapterRoom
from orbit_cli.sglang_plugin.rotation import rotate_rows, rotate_slots
from orbit_cli.sglang_plugin.slots import BatchSlots


class SharedExpertsMethod:
    """Wraps the quant method of one FusedMoE layer; every attribute it does not have is the wrapped method's."""

    def __init__(self, layer: nn.Module, path: str, room: AdapterRoom, slots: BatchSlots):
        if layer.moe_ep_size > 1:
            raise ValueError("adapter.expert_targets with expert parallelism is not served; use tensor parallelism")
        self.inner = layer.quant_method
        self.name, self.slots = f"{path}.{SHARED_PROJECTION}.oft_R", slots
        b, hidden = room.block_size, layer.hidden_size
        if not b or hidden % b:
            raise ValueError(
                f"{path} has {hidden} inputs, which blocks of {b} do not divide; set adapter.block_size to a divisor "
                "of every adapted linear's input"
            )
        where = {
            "dtype": layer.moe_runner_config.params_dtype or torch.get_default_dtype(),
            "device": next(layer.parameters()).device,
        }
        self.eye = torch.eye(b, **where)
        self.rotations = self.eye.expand(room.versions + 1, 1, hidden // b, b, b).contiguous()  # [S, 1, n, b, b]
        self.turns = [False] * (room.versions + 1)  # whether a slot holds a rotation

    def __getattr__(self, name: str):
        return getattr(self.__dict__["inner"], name)

    # Filling and reading slots ------------------------------------------------------------------------------------

    def expected(self, kind: str, room: AdapterRoom) -> dict[str, tuple[int, ...]]:
        """Tensor names of this layer and their shapes for one kind of adapter."""
        return {self.name: tuple(self.rotations.shape[2:])} if kind == "oft" else {}

    def write(self, slot: int, kind: str, tensors: dict[str, Tensor], scaling: float) -> None:
        """Copy a version's rotation into a slot; without one it stays the identity."""
        self.clear(slot)
        if self.name in tensors:
            self.rotations[slot, 0].copy_(tensors[self.name])
            self.turns[slot] = True

    def clear(self, slot: int) -> None:
        """Make a slot the identity."""
        self.turns[slot] = False
        self.rotations[slot].copy_(self.eye.expand_as(self.rotations[slot]))

    def held(self, slot: int, names: set[str]) -> dict[str, Tensor]:
        """The named tensors as they lie in a slot, back in bfloat16 (exact)."""
        return {self.name: self.rotations[slot, 0].to(torch.bfloat16)} if self.name in names else {}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a full tensor: all of it."""
        if name != self.name:
            raise KeyError(name)
        return tensor

    # Multiplying --------------------------------------------------------------------------------------------------

    def apply(self, layer: nn.Module, dispatch_output):
        """SGLang's MoE method: routed tokens in, weighted sum of their experts out, [T, H]."""
        if dispatch_output.hidden_states_scale is not None:
            raise ValueError(
                "these tokens were quantised before a shared rotation could turn them; serve with another MoE backend, "
                "or set adapter.expert_width=per_expert"
            )
        # A copy of the tokens in a format of the kernel's own is of x, not of x R, so it is not handed on.
        turned = dispatch_output._replace(
            hidden_states=self._turn(dispatch_output.hidden_states), hidden_states_pre_quant=None
        )
        return self.inner.apply(layer=layer, dispatch_output=turned)

    def _turn(self, x: Tensor) -> Tensor:
        """x [T, H] times the rotation of each token's slot: a new tensor, since router and shared experts read x."""
        if self.slots.on_gpu:  # one kernel, whatever the slots: it lies in CUDA graphs
            return rotate_slots(x.unsqueeze(1), self.rotations, self.slots.token_slot)[0, :, 0]
        uniform = self.slots.uniform
        if uniform is not None:
            return self._turn_rows(x, uniform)
        turned = torch.empty_like(x)
        for slot, rows in self.slots.groups:
            turned.index_copy_(0, rows, self._turn_rows(x[rows], slot))
        return turned

    def _turn_rows(self, x: Tensor, slot: int) -> Tensor:
        return rotate_rows(x, self.rotations[slot, 0].unsqueeze(2))[0] if self.turns[slot] else x
