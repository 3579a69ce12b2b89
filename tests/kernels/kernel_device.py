"""Where kernels run in these tests: natively on a GPU, else under Triton's interpreter, which needs float32."""

import os

import torch

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so this module comes before the kernels

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16


def values(*shape: int, seed: int | None = None) -> torch.Tensor:
    """Standard normal numbers as the kernels take them."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DTYPE).to(DEVICE)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN for what was never written."""
    return ((actual.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm()).item()


def tolerance(roundings: int = 1) -> float:
    """For results rounded `roundings` times to the working dtype and summed in float32."""
    return roundings * torch.finfo(DTYPE).eps * (8 if INTERPRETED else 0.75)
