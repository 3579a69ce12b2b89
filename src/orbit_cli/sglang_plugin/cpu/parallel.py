"""Tensor parallelism on a host without GPUs: gloo does the collectives.

SGLang builds its NCCL and custom communicators whenever a group has more than one rank; on a CPU their constructors
fail, and the all-reduce falls back to torch.distributed without them.
"""

from __future__ import annotations

import inspect

_ACCELERATOR_ONLY = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce")


def init_without_nccl(original, self, *args, **kwargs):
    """Around GroupCoordinator.__init__."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    for name in _ACCELERATOR_ONLY:
        bound.arguments[name] = False
    return original(*bound.args, **bound.kwargs)
