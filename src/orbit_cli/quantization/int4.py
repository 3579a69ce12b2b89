"""INT4, symmetric, groups of 32 along the inputs: compressed-tensors' "pack-quantized", the format of Kimi-K2.

w = q * scale with q in -8..7 stored as the nibble q + 8. Encoding follows compressed-tensors 0.20.1 (scale amax / 7.5,
round half to even, saturate). The scale is rounded to its stored dtype first, so codes fit the scale that is used.
In memory two codes share a byte; the checkpoint's int32 words are the same bytes on a little-endian machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.tensor import QuantizedTensor, check_scale, group_amax

GROUP = 32
SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")
EMPTY_SCALE = torch.finfo(torch.float32).eps  # scale of a group of zeros

SCHEME: dict[str, Any] = {
    "format": "pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    },
}


def quantize(weight: torch.Tensor, name: str, scale_dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    """Encode a weight [N, K]. Raises CheckpointError naming the tensor on NaN, Inf or K no multiple of 32."""
    amax = group_amax(weight, GROUP, name)  # [N, G]
    scale = (amax / 7.5).to(scale_dtype)
    scale = torch.where(scale == 0, torch.tensor(EMPTY_SCALE, dtype=scale_dtype), scale)
    groups = weight.float().unflatten(1, (-1, GROUP)) / scale.float().unsqueeze(-1)  # [N, G, 32]
    codes = groups.round_().clamp_(-8, 7).to(torch.int8).flatten(1)  # [N, K]
    return QuantizedTensor(
        format=NumberFormat.int4, packed=pack_nibbles(codes + 8), scale=scale, shape=tuple(weight.shape)
    )


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [N, ceil(K/2)] of integers 0..15 [N, K], even k in the low nibble; an odd K leaves the last nibble 0."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    pairs = codes.unflatten(-1, (-1, 2))  # [N, K/2, 2]
    return pairs[..., 0] | pairs[..., 1] << 4


def to_words(packed: torch.Tensor) -> torch.Tensor:
    """int32 [N, ceil(K/8)] of bytes [N, K/2], padded with zero nibbles; element 0 is the least significant nibble."""
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4)).contiguous()
    return padded.view(torch.int32)


def to_checkpoint(tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The module's tensors by suffix, as compressed-tensors stores them."""
    return {
        "weight_packed": to_words(tensor.packed),
        "weight_scale": tensor.scale,
        "weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }


def from_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> QuantizedTensor:
    """Read what `to_checkpoint` writes. `weight_shape` is honoured: what pads the last word is no weight."""
    words, scale = tensors["weight_packed"], tensors["weight_scale"]
    rows, columns = (int(size) for size in tensors["weight_shape"])
    if words.dtype != torch.int32 or words.shape != (rows, -(-columns // 8)):
        raise CheckpointError(
            f"{name}.weight_packed is {words.dtype} {tuple(words.shape)} but weight_shape says {rows}x{columns}, "
            f"which packs to torch.int32 ({rows}, {-(-columns // 8)}); the checkpoint is damaged"
        )
    if columns % GROUP or scale.shape != (rows, columns // GROUP):
        raise CheckpointError(
            f"{name}.weight_scale is {tuple(scale.shape)} but groups of {GROUP} over {rows}x{columns} weights need "
            f"({rows}, {columns // GROUP}); only groups of {GROUP} can be used"
        )
    check_scale(scale, f"{name}.weight_scale")
    packed = words.contiguous().view(torch.uint8)[:, : columns // 2]
    return QuantizedTensor(format=NumberFormat.int4, packed=packed, scale=scale, shape=(rows, columns))
