"""A PEFT folder, or the masters in a checkpoint, as a servable version, without a trainer's model: what `orbit eval`
and `orbit rollout` publish.

The rotations (or A and B) are built in float32 and rounded to bfloat16 once, by the functions the trainer uses, so an
exported adapter is served as the very bytes it was trained with.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from orbit_cli.adapters.bundle import make_version
from orbit_cli.adapters.oft import cayley_neumann
from orbit_cli.adapters.peft_experts import is_fused
from orbit_cli.adapters.peft_io import SUFFIXES, read_peft
from orbit_cli.errors import CheckpointError
from orbit_cli.types import AdapterSpec, AdapterVersion


@torch.no_grad()
def load_peft_version(folder: Path, number: int) -> AdapterVersion:
    """Version `number` from a PEFT folder. Raises CheckpointError for what cannot be served from the file alone."""
    read = read_peft(folder)
    masters = {}
    for name, tensor in read.tensors.items():
        path, suffix, _ = name.rsplit(".", 2)
        if is_fused(path):
            raise CheckpointError(
                f"{folder} has LoRA experts in PEFT's fused layout; set adapter.init_from to it in a training run, "
                "whose adapters folder then has them one by one"
            )
        masters[f"{path}.{SUFFIXES[f'{suffix}.weight']}"] = tensor
    return version_of_masters(masters, read.spec, number)


@torch.no_grad()
def version_of_masters(masters: dict[str, Tensor], spec: AdapterSpec, number: int) -> AdapterVersion:
    """Version `number` from a bank's `named_state` (path.oft_skew [n, p], or path.lora_A and path.lora_B)."""
    tensors = {}
    for name, tensor in masters.items():
        path, _, suffix = name.rpartition(".")
        value = tensor.to(torch.float32)
        if suffix == "oft_skew":
            suffix, value = "oft_R", cayley_neumann(value, spec.block_size, spec.neumann_terms)  # [n, b, b]
        tensors[f"{path}.{suffix}"] = value.to(torch.bfloat16)
    return make_version(number, spec, tensors)
