"""Kernels of a chain that start before the one before them ends (programmatic dependent launch, Hopper and later).

A short kernel costs less than its launch. One of the chain is launched as soon as its predecessor runs, sets up its
multiprocessors, and waits in `after_previous` for all that the predecessor wrote. It must not touch memory before;
then nothing changes for a kernel that is not of the chain, before or behind it.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl


@triton.jit
def after_previous(CHAINED: tl.constexpr):
    """Wait for the kernel before, then let the one behind start."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def chained() -> dict[str, bool]:
    """The arguments of a launch in a chain, for a kernel that calls `after_previous` first."""
    able = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()
    able = able and torch.cuda.get_device_capability() >= (9, 0)
    return {"CHAINED": True, "launch_pdl": True} if able else {"CHAINED": False}
