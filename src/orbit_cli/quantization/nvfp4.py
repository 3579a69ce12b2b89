"""NVFP4: E2M1 codes with one E4M3 scale per 16 inputs and one float32 per tensor ("nvfp4-pack-quantized").

w = e2m1 * scale / global_scale: compressed-tensors stores the global scale as a divisor (ModelOpt stores its inverse).
Encoding follows compressed-tensors 0.20.1: global = 448 * 6 / amax(tensor), scale = e4m3(global * amax(group) / 6), or
0.125 where that is 0. Linears that an engine fuses (q, k, v; gate, up) must share one global scale: pass `tensor_amax`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.int4 import pack_nibbles
from orbit_cli.quantization.mxfp4 import encode_e2m1
from orbit_cli.quantization.tensor import QuantizedTensor, check_scale, group_amax

GROUP = 16
SUFFIXES = ("weight_packed", "weight_scale", "weight_global_scale")
E4M3_MAX, E2M1_MAX, EMPTY_SCALE = 448.0, 6.0, 0.125

SCHEME: dict[str, Any] = {
    "format": "nvfp4-pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": GROUP,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    },
}


def global_scale_of(tensor_amax: float) -> torch.Tensor:
    """float32 [1]: 448 * 6 / amax; 1 where that is no finite number (an amax of 0, or nearly)."""
    tiny = torch.finfo(torch.float32).tiny
    amax = torch.tensor([tensor_amax], dtype=torch.float32).clamp_(min=tiny)
    return torch.nan_to_num(E4M3_MAX * E2M1_MAX / amax, nan=1.0, posinf=1.0, neginf=1.0)


def quantize(weight: torch.Tensor, name: str, tensor_amax: float | None = None) -> QuantizedTensor:
    """Encode a weight [N, K]; `tensor_amax` is the amax over all linears that share the global scale.

    Raises CheckpointError naming the tensor on NaN, Inf or K no multiple of 16.
    """
    amax = group_amax(weight, GROUP, name)  # [N, G]
    global_scale = global_scale_of(amax.max().item() if tensor_amax is None else tensor_amax)
    scale = (global_scale * (amax / E2M1_MAX)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() == 0, EMPTY_SCALE, scale.float())  # [N, G], values of e4m3
    groups = weight.float().unflatten(1, (-1, GROUP)) / (scale / global_scale).unsqueeze(-1)  # [N, G, 16]
    return QuantizedTensor(
        format=NumberFormat.nvfp4,
        packed=pack_nibbles(encode_e2m1(groups).flatten(1)),
        scale=scale.to(torch.float8_e4m3fn),
        shape=tuple(weight.shape),
        global_scale=global_scale,
    )


def to_checkpoint(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The module's tensors by suffix, as compressed-tensors stores them."""
    return {
        "weight_packed": tensor.packed,
        "weight_scale": tensor.scale,
        "weight_global_scale": tensor.global_scale,
    }


def from_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> QuantizedTensor:
    """Read what `to_checkpoint` writes. Raises CheckpointError on wrong shapes and on scales that are 0, NaN or Inf."""
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    global_scale = tensors["weight_global_scale"].float().reshape(-1)
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if packed.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn or scale.shape != (rows, columns // GROUP):
        raise CheckpointError(
            f"{name}: weight_packed {packed.dtype} {tuple(packed.shape)} needs weight_scale torch.float8_e4m3fn "
            f"({rows}, {columns // GROUP}), found {scale.dtype} {tuple(scale.shape)}; the checkpoint is damaged"
        )
    check_scale(scale, f"{name}.weight_scale")
    check_scale(global_scale, f"{name}.weight_global_scale")
    return QuantizedTensor(
        format=NumberFormat.nvfp4, packed=packed, scale=scale, shape=(rows, columns), global_scale=global_scale
    )
