"""Decoding of packed weights: the one place in the project that turns stored bytes into numbers.

Trainer, converter and the engine plugin all call `dequantize`, so all of them multiply by the same weights. Encoding,
file layout and checks of untrusted input live in `orbit_cli.quantization`; this module trusts its tensors.

Shape letters: ... any leading dims (experts), N outputs, K inputs, G groups along K. Two 4-bit codes share a byte, the
even k in the low nibble (the layout of compressed-tensors and of SGLang's Triton experts).
"""

from __future__ import annotations

import functools

import torch

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of FP4 codes 0-7 (OCP MX 1.0, 2310.10537); codes 8-15 are their negatives, code 8 is -0."""

FP8_BLOCK = 128
"""Rows and columns of an FP8 scale block (DeepSeek-V3, 2412.19437)."""

GROUP = {"int4": 32, "mxfp4": 32, "nvfp4": 16}
"""Weights of a row that share a scale, of the formats that put two codes in a byte."""

FORMATS = ("int4", "mxfp4", "nvfp4", "fp8", "bf16")


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    fmt: str,
    dtype: torch.dtype,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weights [..., N, K] in `dtype` from their stored form.

    fmt    packed                          scale
    int4   uint8 [..., N, K/2]             float [..., N, K/32];  w = (code - 8) * scale
    mxfp4  uint8 [..., N, K/2]             uint8 UE8M0 [..., N, K/32];  w = e2m1 * 2^(byte - 127), byte 255 = NaN
    nvfp4  uint8 [..., N, K/2]             float8_e4m3fn [..., N, K/16];  w = e2m1 * (scale / global_scale),
                                           global_scale float32 with one element per leading index
    fp8    float8_e4m3fn [..., N, K]       float32 [..., ceil(N/128), ceil(K/128)];  w = fp8 * scale
    bf16   float [..., N, K]               None;  only a cast, and no copy if the dtype is already right

    The product is formed in float32 (float64 for dtype=float64) and rounded once. Raises ValueError for another fmt.
    """
    if fmt == "bf16":
        return packed.to(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if fmt == "fp8":
        return _scale_blocks(packed.to(compute), scale.to(compute)).to(dtype)
    if fmt == "int4":
        values, group_scale = _int4_values(packed, compute), scale.to(compute)
    elif fmt == "mxfp4":
        values, group_scale = _e2m1_values(packed, compute), decode_ue8m0(scale).to(compute)
    elif fmt == "nvfp4":
        values, group_scale = _e2m1_values(packed, compute), _nvfp4_scale(scale, global_scale).to(compute)
    else:
        raise ValueError(f"number format {fmt!r} cannot be decoded; use one of {', '.join(FORMATS)}")
    groups = values.unflatten(-1, (group_scale.shape[-1], -1))  # [..., N, G, K/G]
    return groups.mul_(group_scale.unsqueeze(-1)).flatten(-2).to(dtype)


def decode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two, float32 in the shape of `scale`: 2^(byte - 127); byte 0 is subnormal 2^-127, byte 255 is NaN."""
    return _ue8m0_table(scale.device)[scale.int()]


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes 0..15, uint8 [..., K], of bytes [..., K/2]; the low nibble is the even k."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _int4_values(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers -8..7 [..., K] in `dtype`.

    Both nibbles of a byte are spread over one int16, which is then read as two bytes: all steps are vectorised integer
    operations. On one AVX2 core 1536x576 takes 0.6 ms, a table lookup 0.7 ms, a lookup of rows 2.8 ms.
    """
    words = packed.to(torch.int16)
    codes = (words & 0x0F).bitwise_or_((words & 0xF0).mul_(16)).view(torch.int8)  # [..., K]
    return codes.sub_(8).to(dtype)


def _e2m1_values(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP4 values [..., K] in `dtype`, the sign of -0 kept. One 8-byte table entry, two float32 values, per byte."""
    entries = torch.index_select(_e2m1_pairs(packed.device), 0, packed.reshape(-1).int())  # [bytes] float64
    return entries.view(torch.float32).view(*packed.shape[:-1], -1).to(dtype)


def _nvfp4_scale(scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, G]; compressed-tensors stores the global scale as a divisor."""
    divisor = global_scale.float().reshape(*scale.shape[:-2], 1, 1)
    return scale.float() / divisor


def _scale_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply [..., N, K] in place by its 128x128 block scales; blocks at the edge may be smaller."""
    rows, columns = weight.shape[-2:]
    per_row = scale.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]  # [..., N, ceil(K/128)]
    for block in range(scale.shape[-1]):
        start = block * FP8_BLOCK
        weight[..., start : min(start + FP8_BLOCK, columns)].mul_(per_row[..., block : block + 1])
    return weight


@functools.cache
def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """[256] float64 whose bits are the two float32 values of each byte; never used as float64 numbers."""
    table = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], dtype=torch.float32)
    codes = unpack_codes(torch.arange(256, dtype=torch.uint8).unsqueeze(-1))  # [256, 2]
    return table[codes.long()].view(torch.float64).squeeze(-1).to(device)


@functools.cache
def _ue8m0_table(device: torch.device) -> torch.Tensor:
    powers = [2.0 ** (byte - 127) for byte in range(255)] + [float("nan")]
    return torch.tensor(powers, dtype=torch.float32, device=device)
