"""LoRA: y = x W^T + s (x A^T) B^T, A [r, in], B [out, r] (2106.09685).

The scaling s is resolved in the spec (alpha / r, or alpha / sqrt(r) for rsLoRA); no dropout: it would move the
log-probs that importance ratios are made of. DoRA, bias and rank patterns are left out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from orbit_kernels.leaves import operand


def low_rank(x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """s (x A^T) B^T: x [..., in], A [r, in], B [out, r] -> [..., out], in x's dtype."""
    return F.linear(F.linear(x, operand(a, x.dtype)) * scaling, operand(b, x.dtype))


def init_a(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """PEFT's start for A: kaiming_uniform with a = sqrt(5), that is uniform in +-1/sqrt(in). B starts at zero."""
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
