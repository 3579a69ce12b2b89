"""The vocabulary product on a CPU.

For a handful of tokens against a large vocabulary the library's W x^T is a quarter faster than x W^T (103 against
141 ms of one AVX2 core for 64 tokens, 49152 x 576, float32, MKL 2024.2); the numbers are the same, turned once.
"""

from __future__ import annotations

import torch

_FEW_TOKENS = 256


def compute_lm_head(original, self, hidden_states, lm_head, embedding_bias=None):
    """Around LogitsProcessor._compute_lm_head: [T, H] -> [T, V]."""
    weight = getattr(lm_head, "weight", None)
    plain = weight is not None and weight.dtype == hidden_states.dtype and embedding_bias is None
    if not plain or hidden_states.dim() != 2 or hidden_states.shape[0] > _FEW_TOKENS or self.use_fp32_lm_head:
        return original(self, hidden_states, lm_head, embedding_bias)
    return torch.mm(weight, hidden_states.t()).t().contiguous()
