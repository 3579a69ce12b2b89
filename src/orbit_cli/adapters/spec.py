"""From the config's adapter group to an AdapterSpec: rsLoRA is resolved here and nowhere else."""

from __future__ import annotations

import math

from orbit_cli.config.schema.base import AdapterConfig, AdapterKind
from orbit_cli.types import AdapterSpec


def spec_from_config(config: AdapterConfig) -> AdapterSpec:
    """What the adapter is, apart from its numbers. LoRA's scaling is alpha / r, or alpha / sqrt(r) (2312.03732)."""
    names = {
        "targets": tuple(config.targets),
        "expert_targets": tuple(config.expert_targets),
        "expert_width": str(config.expert_width),
    }
    if config.kind is AdapterKind.oft:
        return AdapterSpec(kind="oft", **names, block_size=config.block_size, neumann_terms=config.neumann_terms)
    scaling = config.alpha / (math.sqrt(config.rank) if config.use_rslora else config.rank)
    return AdapterSpec(kind="lora", **names, rank=config.rank, scaling=scaling)
