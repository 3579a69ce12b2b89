"""transformers' model of a checkpoint's config.json, without numbers: on the meta device, its linears and experts
replaced by the frozen ones that are filled later (build.py) or compared with the files (check.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from orbit_cli.errors import CheckpointError
from orbit_cli.models.families import Family, family_of
from orbit_cli.models.frozen import FrozenExperts, FrozenLinear
from orbit_cli.quantization.checkpoint import CheckpointReader


@dataclass(kw_only=True, slots=True)
class EmptyModel:
    """The architecture, and the frozen modules in it by transformers' path."""

    family: Family
    config: PretrainedConfig
    module: nn.Module
    linears: dict[str, FrozenLinear]
    experts: dict[str, FrozenExperts]


def empty_model(reader: CheckpointReader) -> EmptyModel:
    """What config.json describes. Raises CheckpointError naming the field that transformers cannot use."""
    family = family_of(reader.config)
    fields = family.text_config(reader.config)
    try:
        config = _config(dict(fields))
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except Exception as error:  # a config class raises whatever its arithmetic on a wrong value does
        raise CheckpointError(
            f"{reader.path / 'config.json'} cannot be used: {_told(error, fields)}; copy the model's own file"
        ) from error
    linears, experts = _swap(module)
    return EmptyModel(family=family, config=config, module=module, linears=linears, experts=experts)


def _config(fields: dict[str, Any]) -> PretrainedConfig:
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.attention_dropout = 0.0  # dropout would move the log-probs that importance ratios are made of
    config.use_cache = False
    return config


def _told(error: Exception, fields: dict[str, Any]) -> str:
    """transformers' complaint in one clause, with the fields that it is likely about where it names none."""
    cause = error.__cause__ if isinstance(error.__cause__, TypeError | ValueError) else error
    text = " ".join(re.sub(r"\. Errors:.*|<class '(.*?)'>", r"\1", str(cause), flags=re.DOTALL).split())
    if isinstance(cause, TypeError | ValueError) and text:
        return text
    if isinstance(cause, KeyError):
        found = [f"{key}={value!r}" for key, value in _leaves(fields) if value == cause.args[0]]
        return f"transformers does not know {' or '.join(found) or text}"
    low = [f"{key}={value}" for key, value in _leaves(fields) if isinstance(value, int) and value <= 0]
    low = [pair for pair in low if pair.partition("=")[0].endswith(("_size", "_heads", "_layers", "_dim", "_rank"))]
    return f"{', '.join(low) or 'its values'} cannot be computed with ({type(cause).__name__}: {text})"


def _leaves(fields: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in fields.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _swap(module: nn.Module) -> tuple[dict[str, FrozenLinear], dict[str, FrozenExperts]]:
    """Replace every linear of the decoder and every fused experts module; returns them by transformers' path."""
    linears, experts = {}, {}
    for path, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and child is not module.get_output_embeddings():
            linears[path] = FrozenLinear(child.in_features, child.out_features, bias=child.bias is not None)
            module.set_submodule(path, linears[path])
        elif path.endswith(".mlp.experts"):
            count, twice, hidden = child.gate_up_proj.shape
            experts[path] = FrozenExperts(count, hidden, twice // 2)
            module.set_submodule(path, experts[path])
    return linears, experts
