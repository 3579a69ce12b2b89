"""INT4 routed experts on a CPU: dequantise the experts that a batch uses, then dense products.

The layer holds what a GPU holds under `moe_runner_backend=triton`: w*_weight_packed [E, N, K/2] uint8 and
w*_weight_scale [E, N, K/32]. Left out: adapters (experts.py one folder up) and act-order or zero points (refused).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from orbit_cli.sglang_plugin.experts import expert_weights


def apply_weights(self, layer: nn.Module, dispatch_output):
    """Takes the place of CompressedTensorsWNA16TritonMoE.apply_weights: [T, H] in, [T, H] out."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    out = torch.zeros_like(x)  # [T, H]
    for expert in topk.topk_ids.unique().tolist():
        rows, choice = (topk.topk_ids == expert).nonzero(as_tuple=True)
        w13, w2 = expert_weights(layer, expert, x.dtype)
        gate, up = F.linear(x[rows], w13).chunk(2, dim=1)  # [t, I] each
        y = F.linear(F.silu(gate) * up, w2)  # [t, H]
        out.index_add_(0, rows, y * topk.topk_weights[rows, choice].to(y.dtype).unsqueeze(1))
    return StandardCombineInput(hidden_states=out)
