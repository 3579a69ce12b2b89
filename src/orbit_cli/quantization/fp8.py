"""FP8 E4M3 in blocks of 128x128 with float32 scales (DeepSeek-V3, 2412.19437): "float-quantized" with block strategy.

w = fp8 * scale with scale = amax(block) / 448. Blocks at the edge are as small as the weight makes them. torch's cast
does not saturate (465 becomes NaN), so values are clamped first. DeepSeek's `weight_scale_inv` is the same multiplier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.tensor import QuantizedTensor, check_divisible, check_finite, check_scale
from orbit_kernels.decode import FP8_BLOCK

GROUP = 1  # any shape can be stored
SUFFIXES = ("weight", "weight_scale")
E4M3_MAX = 448.0
EMPTY_SCALE = torch.finfo(torch.float32).eps  # scale of a block of zeros

SCHEME: dict[str, Any] = {
    "format": "float-quantized",
    "weights": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "block",
        "block_structure": [FP8_BLOCK, FP8_BLOCK],
        "dynamic": False,
    },
}

ACTIVATIONS: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": FP8_BLOCK,
    "dynamic": True,
}
"""The published block scheme quantises activations in groups of 128 on the fly; SGLang's own kernels accept no other.
Declared where every quantised linear has a multiple of 128 inputs; otherwise the checkpoint is weight-only."""


def quantize(weight: torch.Tensor, name: str) -> QuantizedTensor:
    """Encode a weight [N, K] of any size. Raises CheckpointError naming the tensor on NaN or Inf."""
    check_divisible(weight, GROUP, name)
    rows, columns = weight.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    blocks = torch.nn.functional.pad(weight.float(), padding)
    blocks = blocks.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))  # [N/128, 128, K/128, 128]
    amax = blocks.abs().amax((1, 3))  # [N/128, K/128]
    check_finite(amax, name)
    scale = amax / E4M3_MAX
    scale = torch.where(scale == 0, EMPTY_SCALE, scale)
    scaled = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).flatten(2).flatten(0, 1)
    packed = scaled[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return QuantizedTensor(format=NumberFormat.fp8, packed=packed, scale=scale, shape=(rows, columns))


def to_checkpoint(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The module's tensors by suffix, as compressed-tensors stores them."""
    return {"weight": tensor.packed, "weight_scale": tensor.scale}


def from_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> QuantizedTensor:
    """Read what `to_checkpoint` writes. Raises CheckpointError on wrong shapes and on scales that are 0, NaN or Inf."""
    packed, scale = tensors["weight"], tensors["weight_scale"].float()
    rows, columns = packed.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if packed.dtype != torch.float8_e4m3fn or scale.shape != blocks:
        raise CheckpointError(
            f"{name}: an FP8 weight of {rows}x{columns} needs weight_scale {blocks} for blocks of "
            f"{FP8_BLOCK}x{FP8_BLOCK}, found {packed.dtype} with {tuple(scale.shape)}; other scalings cannot be used"
        )
    check_scale(scale, f"{name}.weight_scale")
    return QuantizedTensor(format=NumberFormat.fp8, packed=packed, scale=scale, shape=(rows, columns))
