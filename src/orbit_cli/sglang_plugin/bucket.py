"""One adapter version as one contiguous buffer and an index: what crosses into SGLang's processes.

Deserialising hundreds of small tensors is most of the time of a swap, so a version travels as a single tensor.
Left out: the checksum rule (orbit_cli.adapters.bundle) and where the tensors go (manager.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BUCKET = "orbit.bucket"  # name of the one tensor in the push

Index = list[list]  # [name, offset in elements, shape] for each tensor, in sorted name order


def pack(tensors: dict[str, Tensor]) -> tuple[Tensor, Index]:
    """All tensors in sorted name order in one flat buffer of their dtype, and where each lies.

    Raises ValueError if the tensors do not share one dtype.
    """
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) > 1:
        raise ValueError(f"an adapter version must have one dtype, found {sorted(map(str, dtypes))}")
    index: Index = []
    offset = 0
    for name in sorted(tensors):
        index.append([name, offset, list(tensors[name].shape)])
        offset += tensors[name].numel()
    parts = [tensors[name].detach().reshape(-1) for name, _, _ in index]
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.bfloat16)  # [elements]
    return flat, index


def unpack(flat: Tensor, index: Index) -> dict[str, Tensor]:
    """Views of the buffer by name. Raises ValueError on an index that overlaps, repeats or does not cover it."""
    tensors: dict[str, Tensor] = {}
    expected = 0
    for name, offset, shape in index:
        size = math.prod(shape)
        if name in tensors:
            raise ValueError(f"the index names {name} twice")
        if offset != expected or offset + size > flat.numel():
            raise ValueError(f"{name} lies at [{offset}, {offset + size}) but [{expected}, {flat.numel()}) is left")
        tensors[name] = flat[offset : offset + size].view(shape)
        expected = offset + size
    if expected != flat.numel():
        raise ValueError(f"the index covers {expected} of the buffer's {flat.numel()} elements")
    return tensors
