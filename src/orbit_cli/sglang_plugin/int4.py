"""INT4 linears (compressed-tensors pack-quantized, groups of 32, symmetric) through orbit_kernels.

After loading, each projection of a layer becomes one linear of orbit_kernels with the trainer's own numbers: decoded
once on a CPU, where SGLang has no kernel for this format, and packed on a GPU, where the trainer multiplies by the same
bytes with the same kernel (SGLang's Marlin sums in another order). A fused layer (q, k, v) keeps one per projection,
so that each can have its own input. Left out: routed experts (experts.py), zero points and act-order (refused).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


def check_scheme_supported(self, min_capability: int, error: bool = True) -> bool:
    """Takes the place of a check of the CUDA device's capability."""
    return True


def with_float32(result: list, *_args) -> list:
    """After CompressedTensorsConfig.get_supported_act_dtypes: float32 activations are fine on a CPU."""
    return [*result, torch.float32] if torch.float32 not in result else result


def process_weights(self, layer: nn.Module) -> None:
    """Takes the place of CompressedTensorsWNA16.process_weights_after_loading (Marlin repacking)."""
    from orbit_kernels.linear import PackedLinear, PreparedLinear

    if not self.symmetric or self.has_g_idx or self.group_size != 32:
        raise ValueError(
            "the engine serves symmetric INT4 in groups of 32 without act-order; "
            f"this checkpoint has symmetric={self.symmetric}, group_size={self.group_size}, act-order={self.has_g_idx}"
        )
    # int32 [N, K/8], value j of a word at bits 4j: as bytes on a little-endian host that is [N, K/2], even k low.
    packed = layer.weight_packed.data.contiguous().view(torch.uint8)
    scale = layer.weight_scale.data
    sizes = getattr(layer, "output_partition_sizes", None) or [packed.shape[0]]
    make = PackedLinear if packed.is_cuda else partial(PreparedLinear, dtype=layer.params_dtype)
    layer.orbit_pieces = [
        make(part, part_scale, "int4") for part, part_scale in zip(packed.split(sizes), scale.split(sizes), strict=True)
    ]


def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Takes the place of CompressedTensorsWNA16.apply_weights: x [T, K] -> [T, N]."""
    pieces = layer.orbit_pieces
    if len(pieces) == 1:
        return pieces[0].apply(x, bias)
    biases = [None] * len(pieces) if bias is None else bias.split(layer.output_partition_sizes)
    return torch.cat([piece.apply(x, part) for piece, part in zip(pieces, biases, strict=True)], dim=1)
