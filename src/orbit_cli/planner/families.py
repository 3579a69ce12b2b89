"""From a config to a ModelShape and to the storage rules of its base: the one registry of families. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orbit_cli.config.schema.base import ModelConfig, ModelSource, QuantizationConfig
from orbit_cli.errors import ConfigError
from orbit_cli.planner.deepseek_v4 import deepseek_v4
from orbit_cli.planner.dense import grouped_query
from orbit_cli.planner.facts import Facts
from orbit_cli.planner.latent import latent_attention
from orbit_cli.planner.shape import ModelShape
from orbit_cli.planner.storage import Rules

FAMILIES: dict[str, Callable[[Facts], ModelShape]] = {
    "llama": grouped_query,
    "qwen2": grouped_query,
    "qwen3": grouped_query,
    "qwen3_moe": grouped_query,
    "deepseek_v3": latent_attention,
    "kimi_k2": latent_attention,
    "kimi_k25": latent_attention,
    "deepseek_v4": deepseek_v4,
}


def shape_of(facts: Facts) -> ModelShape:
    """The model's shape. Raises ConfigError for a family that cannot be sized."""
    if facts.model_type not in FAMILIES:
        raise ConfigError(
            f"{facts.where}: model_type {facts.model_type!r} cannot be planned; families are {', '.join(FAMILIES)}"
        )
    return FAMILIES[facts.model_type](facts)


def published_rules(facts: Facts) -> Rules:
    """How the published files store the model. Raises ConfigError for a scheme that is none of ours."""
    section = facts.quantization
    if not section:
        return Rules(formats={})
    method = section.get("quant_method")
    if facts.model_type == "deepseek_v4":
        # config.json says fp8; the routed experts are FP4 unless expert_dtype says otherwise.
        experts = "fp8" if facts.text.get("expert_dtype") == "fp8" else "mxfp4"
        formats = {name: "fp8" for name in ("attention", "shared", "indexer", "mtp")} | {"experts": experts}
        return Rules(formats=formats, scale_bytes=1)
    if method == "fp8":
        return Rules(formats={"*": "fp8"})
    if method == "compressed-tensors":
        return Rules(formats={"*": _scheme(section, facts.where)}, ignore=_ignored(section, facts.where))
    raise ConfigError(
        f"{facts.where}: quant_method {method!r} cannot be planned; use compressed-tensors, fp8 or an unquantised model"
    )


def base_rules(model: ModelConfig, quantization: QuantizationConfig, published: Rules) -> Rules:
    """How the base that trainer and engine use is stored: as published where it is in the wanted format already, and as
    `orbit quantize` would store it otherwise. Raises ConfigError for files that can only be used as they are."""
    wanted, checkpoint = str(quantization.format), model.source is ModelSource.checkpoint
    experts = published.formats.get("experts")
    if checkpoint and (wanted == "bf16" or wanted in (experts, published.formats.get("*"))):
        return published
    if checkpoint and experts:
        others = {name for kind, name in published.formats.items() if kind != "experts"} - {experts}
        beside = f" beside {' and '.join(sorted(others)).upper()}" if others else ""
        raise ConfigError(
            f"quantization.format={wanted}: the files of {model.name} hold {experts.upper()} experts{beside}, which "
            f"Orbit uses as they are; set quantization={experts}"
        )
    if wanted == "bf16":
        return Rules(formats={})
    return Rules(
        formats={"*": wanted}, targets=tuple(quantization.targets), ignore=tuple(quantization.ignore), shape_bytes=8
    )


def _ignored(section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    ignored = section.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise ConfigError(
            f"{where}: quantization_config.ignore={ignored!r} must be a list of names; copy the file again"
        )
    return tuple(ignored)


def _scheme(section: Mapping[str, Any], where: str) -> str:
    groups = section.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ConfigError(f"{where}: quantization_config.config_groups must be mappings; copy the file again")
    kinds = {str(group.get("format") or section.get("format")) for group in groups.values()}
    kinds = kinds or {str(section.get("format"))}
    known = {"pack-quantized": "int4", "mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}
    known["float-quantized"] = "fp8"
    names = {known.get(kind) for kind in kinds}
    if len(names) != 1 or None in names:
        raise ConfigError(
            f"{where}: the storage {', '.join(sorted(kinds))} cannot be planned; use one of {sorted(known)}"
        )
    return str(names.pop())
