"""Where the kernels of these tests run: natively in BF16 on a GPU, or in float32 under Triton's interpreter."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def values(*shape: int) -> torch.Tensor:
    """Standard normal numbers as the kernels take them."""
    return torch.randn(*shape).to(DTYPE).to(DEVICE)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN for what was never written."""
    expected = expected.double().cpu()
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


def tolerance(roundings: int = 1) -> float:
    """For results that were summed in float32 and rounded `roundings` times to the working dtype."""
    return roundings * torch.finfo(DTYPE).eps * (8 if INTERPRETED else 0.75)
