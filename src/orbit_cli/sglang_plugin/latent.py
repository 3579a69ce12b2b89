"""OFT on kv_b_proj where DeepSeek's attention has absorbed it (MLA; 2405.04434, section 2.1).

kv_b_proj maps the cached latent c to keys and values, k = (c R) W_k^T and v = (c R) W_v^T. Absorbed decoding never
forms k or v: it scores q W_k against c and projects the attended latent by W_v. Moving R to the token's own side
gives the same numbers with an untouched cache: the query becomes (q W_k) R^T and the attended latent is rotated by R
before W_v. Both happen around the latent attention `attn_mqa`. Left out: LoRA on
kv_b_proj (its sum needs q before absorption).

Shape letters: T tokens, H heads, c latent size (kv_lora_rank).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from orbit_cli.sglang_plugin.linear import AdaptedLinearMethod
from orbit_cli.sglang_plugin.rotation import rotate_rows, rotate_slots


class RotatedLatentAttention:
    """Takes the place of `attn_mqa.forward` in one attention module."""

    def __init__(self, forward: Callable, latent_size: int, method: AdaptedLinearMethod):
        self.forward = forward
        self.size = latent_size
        self.method = method

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, forward_batch, *args, **kwargs) -> Tensor:
        """q [T, H, c] or [T, H, c + rope]; returns the attended latent [T, H * c]."""
        if self._all_base():
            return self.forward(q, k, v, forward_batch, *args, **kwargs)
        turned = self._rotate(q[..., : self.size], transpose=True)
        if q.shape[-1] > self.size:
            turned = torch.cat([turned, q[..., self.size :]], dim=-1)
        attended = self.forward(turned, k, v, forward_batch, *args, **kwargs)
        heads = attended.view(attended.shape[0], -1, self.size)  # [T, H, c]
        return self._rotate(heads, transpose=False).reshape(attended.shape)

    def _all_base(self) -> bool:
        slots = self.method.slots
        return not slots.on_gpu and slots.uniform is not None and self.method.kinds[slots.uniform] != "oft"

    def _rotate(self, x: Tensor, transpose: bool) -> Tensor:
        """x [T, H, c] by each token's rotation (or its transpose)."""
        slots, rotations = self.method.slots, self.method.rotations
        if slots.on_gpu:
            return rotate_slots(x.contiguous(), rotations, slots.token_slot, transpose=transpose)[0]
        if slots.uniform is not None:
            return self._rotate_slot(x, slots.uniform, transpose)
        out = x.new_empty(x.shape)
        for slot, rows in slots.groups:
            out.index_copy_(0, rows, self._rotate_slot(x.index_select(0, rows), slot, transpose))
        return out

    def _rotate_slot(self, x: Tensor, slot: int, transpose: bool) -> Tensor:
        blocks = self.method.rotations[slot, 0]  # [n, b, b]
        blocks = blocks.transpose(1, 2) if transpose else blocks
        return rotate_rows(x.reshape(-1, self.size), blocks.unsqueeze(2))[0].view(x.shape)  # from [T*H, c]


def rotate_latent_attention(attention: nn.Module, method: AdaptedLinearMethod) -> None:
    """Install the rotation around one DeepSeek attention module's latent attention."""
    mqa = attention.attn_mqa
    mqa.forward = RotatedLatentAttention(mqa.forward, attention.kv_lora_rank, method)
