"""A PEFT folder as a servable version, without a trainer's model: what `orbit eval` and `orbit rollout` publish.

The rotations (or A and B) are built in float32 and rounded to bfloat16 once, by the functions the trainer uses, so an
exported adapter is served as the very bytes it was trained with.
"""

from __future__ import annotations

from pathlib import Path

import torch

from orbit_cli.adapters.bundle import make_version
from orbit_cli.adapters.oft import cayley_neumann
from orbit_cli.adapters.peft_experts import is_fused
from orbit_cli.adapters.peft_io import read_peft
from orbit_cli.errors import CheckpointError
from orbit_cli.types import AdapterVersion


@torch.no_grad()
def load_peft_version(folder: Path, number: int) -> AdapterVersion:
    """Version `number` from a PEFT folder. Raises CheckpointError for what cannot be served from the file alone."""
    read = read_peft(folder)
    tensors = {}
    for name, tensor in read.tensors.items():
        path, suffix, _ = name.rsplit(".", 2)
        if is_fused(path):
            raise CheckpointError(
                f"{folder} has LoRA experts in PEFT's fused layout; set adapter.init_from to it in a training run, "
                "whose adapters folder then has them one by one"
            )
        value = tensor.to(torch.float32)
        if suffix == "oft_R":
            value = cayley_neumann(value, read.spec.block_size, read.spec.neumann_terms)  # [n, b, b]
        tensors[f"{path}.{suffix}"] = value.to(torch.bfloat16)
    return make_version(number, read.spec, tensors)
