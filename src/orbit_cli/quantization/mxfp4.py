"""MXFP4: E2M1 codes with one power-of-two scale per 32 inputs (OCP MX 1.0, 2310.10537), and the E2M1 encoder.

w = e2m1 * 2^(byte - 127); two codes share a byte, even k in the low nibble; byte 255 is NaN and refused. The exponent
follows compressed-tensors 0.20.1: floor(log2(amax)) - 2, one more from mantissa 1.75 on, which keeps 7 from saturating.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.int4 import pack_nibbles
from orbit_cli.quantization.tensor import QuantizedTensor, check_scale, group_amax

GROUP = 32
SUFFIXES = ("weight_packed", "weight_scale")

SCHEME: dict[str, Any] = {
    "format": "mxfp4-pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    },
}

_BELOW = [math.nextafter(tie, 0.0) for tie in (0.75, 1.75, 3.5)]
# Upper ends of codes 0..6. A tie goes to the even code: 0.25 down to 0, 0.75 up to 1.0, and so on.
_E2M1_ENDS = (0.25, _BELOW[0], 1.25, _BELOW[1], 2.5, _BELOW[2], 5.0)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """FP4 codes 0..15, uint8, of float32 or float64 values: nearest, ties to the even code, saturating at 6."""
    ends = torch.tensor(_E2M1_ENDS, dtype=torch.float64)
    if values.dtype == torch.float32:  # the float32 just below a tie, not the float64 just below it
        ties = torch.tensor((0.75, 1.75, 3.5), dtype=torch.float32)
        ends = ends.float().index_copy(0, torch.tensor((1, 3, 5)), torch.nextafter(ties, torch.zeros(3)))
    magnitudes = torch.bucketize(values.abs(), ends, out_int32=True)
    return (magnitudes + 8 * torch.signbit(values)).to(torch.uint8)


def encode_ue8m0(amax: torch.Tensor) -> torch.Tensor:
    """Scale bytes uint8 of float32 amax >= 0; zero gives byte 0."""
    rounded = (amax.contiguous().view(torch.int32) + 0x0020_0000) >> 23  # exponent, rounded up from mantissa 1.75
    return (rounded - 2).clamp_(0, 254).to(torch.uint8)


def quantize(weight: torch.Tensor, name: str) -> QuantizedTensor:
    """Encode a weight [N, K]. Raises CheckpointError naming the tensor on NaN, Inf or K no multiple of 32."""
    scale = encode_ue8m0(group_amax(weight, GROUP, name))  # [N, G]
    inverse = torch.exp2(127.0 - scale.double()).float().unsqueeze(-1)  # a power of two: the product below is exact
    groups = weight.float().unflatten(1, (-1, GROUP)) * inverse  # [N, G, 32]
    packed = pack_nibbles(encode_e2m1(groups).flatten(1))
    return QuantizedTensor(format=NumberFormat.mxfp4, packed=packed, scale=scale, shape=tuple(weight.shape))


def to_checkpoint(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The module's tensors by suffix, as compressed-tensors stores them."""
    return {"weight_packed": tensor.packed, "weight_scale": tensor.scale}


def from_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> QuantizedTensor:
    """Read what `to_checkpoint` writes. Raises CheckpointError on wrong shapes and on byte 255."""
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8 or scale.shape != (rows, columns // GROUP):
        raise CheckpointError(
            f"{name}: weight_packed {packed.dtype} {tuple(packed.shape)} needs weight_scale torch.uint8 "
            f"({rows}, {columns // GROUP}), found {scale.dtype} {tuple(scale.shape)}; the checkpoint is damaged"
        )
    check_scale(scale, f"{name}.weight_scale")
    return QuantizedTensor(format=NumberFormat.mxfp4, packed=packed, scale=scale, shape=(rows, columns))
