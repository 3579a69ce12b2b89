"""The registry of number formats, and what a checkpoint's config says about them.

Each format is one module with the same six names: GROUP, SUFFIXES, SCHEME, quantize, to_checkpoint, from_checkpoint.
bf16 is the absence of a format and has no entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization import fp8, int4, mxfp4, nvfp4
from orbit_kernels.decode import FP8_BLOCK

FORMATS: dict[NumberFormat, ModuleType] = {
    NumberFormat.int4: int4,
    NumberFormat.mxfp4: mxfp4,
    NumberFormat.nvfp4: nvfp4,
    NumberFormat.fp8: fp8,
}

_WEIGHT_KEYS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")


def quantization_section(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config.json, at the top or in text_config (Kimi-K2.6); None if there is none."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def format_of(config: dict[str, Any], where: str) -> NumberFormat:
    """The number format that a config.json declares; bf16 if it declares none.

    Raises CheckpointError for a scheme that is none of ours, with what was found and what can be used.
    """
    section = quantization_section(config)
    if not section:
        return NumberFormat.bf16
    section = section if isinstance(section, dict) else {}
    method = section.get("quant_method")
    if method == "fp8" and section.get("weight_block_size") == fp8.SCHEME["weights"]["block_structure"]:
        return NumberFormat.fp8
    groups = section.get("config_groups")
    if method == "compressed-tensors" and groups and isinstance(groups, dict):
        matches = {_match_scheme(section, group) for group in groups.values()}
        if len(matches) == 1 and None not in matches:
            return matches.pop()
    keys = ("quant_method", "format", "weight_block_size")
    found = ", ".join(f"{key}={section[key]}" for key in keys if key in section)
    raise CheckpointError(
        f"{where} is quantised as {found or 'something unknown'}, which cannot be used; use compressed-tensors INT4 "
        "(symmetric, groups of 32), MXFP4, NVFP4 or FP8 in blocks of 128x128, or an unquantised checkpoint"
    )


def quantization_config(number_format: NumberFormat, ignore: list[str], columns: Iterable[int]) -> dict[str, Any]:
    """The quantization_config that transformers and SGLang read.

    `ignore` names every linear that is not quantised, `columns` has the input sizes of those that are.
    """
    scheme = FORMATS[number_format].SCHEME
    whole_blocks = number_format is NumberFormat.fp8 and not any(size % FP8_BLOCK for size in columns)
    group = {
        "targets": ["Linear"],
        "weights": dict(scheme["weights"]),
        "input_activations": dict(fp8.ACTIVATIONS) if whole_blocks else None,
        "output_activations": None,
        "format": scheme["format"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": scheme["format"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _match_scheme(section: dict[str, Any], group: dict[str, Any]) -> NumberFormat | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("actorder"):
        return None
    for number_format, module in FORMATS.items():
        wanted = module.SCHEME
        same = all(weights.get(key) == wanted["weights"].get(key) for key in _WEIGHT_KEYS)
        stored_as = group.get("format") or section.get("format")
        if same and stored_as == wanted["format"]:
            return number_format
    return None
