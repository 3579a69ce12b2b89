"""A quantised weight in memory, the checks that no bad number passes, and the error of a quantisation.

The arithmetic of decoding is in `orbit_kernels.decode`, each format's encoding and checkpoint names in its own module
beside this one. Shape letters: N outputs, K inputs, G scale groups along K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_kernels.decode import FP8_BLOCK, dequantize


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """One linear's weight in the layout that trainer and engine multiply by; see `dequantize` for its meaning."""

    format: NumberFormat
    packed: torch.Tensor  # uint8 [N, K/2]; fp8: float8_e4m3fn [N, K]
    scale: torch.Tensor  # int4: float [N, K/32]; mxfp4: uint8 [N, K/32]; nvfp4: e4m3 [N, K/16]; fp8: float32 blocks
    shape: tuple[int, int]  # (out, in)
    global_scale: torch.Tensor | None = None  # nvfp4: float32 [1], a divisor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Weight [N, K] in `dtype`."""
        return dequantize(self.packed, self.scale, self.format.value, dtype, self.global_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (self.packed, self.scale, self.global_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(kw_only=True, slots=True)
class QuantizationError:
    """Error of quantised against original weights; `add` merges tensors, so a whole model has one too."""

    squared_error: float = 0.0
    squared_weight: float = 0.0
    max_abs: float = 0.0
    """Largest |w - w'| of all weights."""

    @property
    def relative_rms(self) -> float:
        """Root mean square error over root mean square weight; 0 for a weight of zeros."""
        return math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else 0.0

    def add(self, other: QuantizationError) -> None:
        self.squared_error += other.squared_error
        self.squared_weight += other.squared_weight
        self.max_abs = max(self.max_abs, other.max_abs)


def measure_error(weight: torch.Tensor, quantized: QuantizedTensor) -> QuantizationError:
    """Error of one tensor, summed in float64 row block by row block, so that no second copy of it is made."""
    error = QuantizationError()
    fp8 = quantized.format is NumberFormat.fp8
    rows = FP8_BLOCK * max(1, (1 << 22) // (FP8_BLOCK * weight.shape[1]))  # about 16 MiB of float32 at a time
    for start in range(0, weight.shape[0], rows):
        block = slice(start, start + rows)
        part = QuantizedTensor(
            format=quantized.format,
            packed=quantized.packed[block],
            scale=quantized.scale[slice(start // FP8_BLOCK, (start + rows) // FP8_BLOCK) if fp8 else block],
            shape=(min(rows, weight.shape[0] - start), weight.shape[1]),
            global_scale=quantized.global_scale,
        )
        original = weight[block].float()
        difference = part.dequantize().sub_(original)
        error.add(
            QuantizationError(
                squared_error=difference.square().sum(dtype=torch.float64).item(),
                squared_weight=original.square().sum(dtype=torch.float64).item(),
                max_abs=difference.abs().max().item(),
            )
        )
    return error


def group_amax(weight: torch.Tensor, group: int, name: str) -> torch.Tensor:
    """Largest |w| of each group, float32 [N, G]. Raises CheckpointError on NaN or Inf, naming the tensor."""
    check_divisible(weight, group, name)
    amax = weight.unflatten(1, (-1, group)).abs().amax(-1).float()
    check_finite(amax, name)
    return amax


def check_divisible(weight: torch.Tensor, group: int, name: str) -> None:
    """Refuse a weight whose inputs are no multiple of the scale group."""
    if weight.ndim != 2:
        raise CheckpointError(f"{name} has {weight.ndim} dimensions but only the weight of a linear can be quantised")
    if weight.shape[1] % group:
        raise CheckpointError(
            f"{name} has {weight.shape[1]} inputs, which is no multiple of the group of {group}; "
            "name it in quantization.ignore to keep it as it is"
        )


def check_finite(amax: torch.Tensor, name: str) -> None:
    """Refuse weights whose largest magnitudes are not finite: a code would hide them."""
    if not torch.isfinite(amax).all():
        kind = "NaN" if torch.isnan(amax).any() else "Inf"
        raise CheckpointError(f"{name} holds {kind}, which no code can store; repair the checkpoint first")


def check_scale(scale: torch.Tensor, name: str) -> None:
    """Refuse stored scales that are Inf, NaN or 0. UE8M0 bytes (uint8) have no 0 and no Inf; 255 is NaN."""
    if scale.dtype == torch.uint8:
        if (scale == 255).any():
            raise CheckpointError(f"{name} holds the UE8M0 byte 255, which is NaN; the checkpoint is damaged")
        return
    values = scale.float()
    for kind, bad in (("NaN", torch.isnan(values)), ("Inf", torch.isinf(values)), ("0", values == 0)):
        if bad.any():
            raise CheckpointError(
                f"{name} holds {int(bad.sum())} scale(s) that are {kind}, so its weights are not usable; "
                "the checkpoint is damaged or was quantised from weights that were not finite"
            )
