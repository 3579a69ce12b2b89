"""Which modules of a checkpoint are quantised, and why the others are not.

Norms, embeddings, output heads, routers and vision towers never are; of the rest, what `quantization.targets` names and
`quantization.ignore` does not. Knows names and shapes, no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orbit_cli.config.schema.base import NumberFormat, QuantizationConfig
from orbit_cli.errors import CheckpointError, ConfigError
from orbit_cli.quantization.formats import FORMATS

NEVER = frozenset(
    {"gate", "router", "shared_expert_gate", "embed_tokens", "lm_head", "vision_tower", "mm_projector", "visual"}
)
"""Path components that are never quantised: routers, embeddings, heads, vision."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Linears that engines fuse into one: one scheme, and for NVFP4 one global scale."""


FUSED_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "q_a_proj": "fused_qkv_a_proj_with_mqa"}


class Source(Protocol):
    """What selecting needs of a checkpoint reader."""

    format: NumberFormat

    def modules(self) -> list[str]: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def is_quantized(self, module: str) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The decision for every linear, and the reasons for those that a target named but that stay as they are."""

    encode: frozenset[str]  # to be quantised
    copy: frozenset[str]  # already in the target format: byte for byte
    plain: tuple[str, ...]  # linears that stay in bfloat16; what engines must be told to ignore
    kept: dict[str, str]  # module -> why, where it was in reach of the targets


def select(source: Source, config: QuantizationConfig) -> Selection:
    """Decide for every module. Raises ConfigError if targets match nothing or fused linears would part."""
    _refuse_fused_experts(source)
    encode, copy, plain, kept = set(), set(), [], {}
    for module in source.modules():
        quantized = source.is_quantized(module)
        if quantized and source.format is config.format:
            copy.add(module)
            continue
        shape = None if quantized and source.format is not NumberFormat.fp8 else source.shape(f"{module}.weight")
        if shape is not None and len(shape) != 2:
            continue
        verdict = _verdict(module, shape, config)
        if verdict is None:
            encode.add(module)
        else:
            if not module.endswith("embed_tokens"):
                plain.append(module)
            if verdict:
                kept[module] = verdict
    if config.format is NumberFormat.bf16:
        return Selection(encode=frozenset(), copy=frozenset(), plain=tuple(plain), kept={})
    if not encode and not copy:
        raise ConfigError(
            f"quantization.targets={list(config.targets)} with quantization.ignore={list(config.ignore)} matches no "
            f"linear; components that exist: {', '.join(_components(source))}"
        )
    _check_fused(encode | copy, plain)
    return Selection(encode=frozenset(encode), copy=frozenset(copy), plain=tuple(plain), kept=kept)


def siblings(module: str) -> tuple[str, ...]:
    """The modules that engines fuse with this one, itself included; a linear alone gives itself."""
    parent, _, name = module.rpartition(".")
    group = next((names for names in FUSED if name in names), (name,))
    return tuple(f"{parent}.{member}" if parent else member for member in group)


def fused_names(plain: Sequence[str]) -> list[str]:
    """What engines call the fusions of plain linears; SGLang looks some of them up under these names alone."""
    present = set(plain)
    names = {
        f"{module.rpartition('.')[0]}.{FUSED_NAMES[name]}"
        for module in plain
        if (name := module.rpartition(".")[2]) in FUSED_NAMES and present.issuperset(siblings(module))
    }
    return sorted(names)


def _verdict(module: str, shape: tuple[int, ...] | None, config: QuantizationConfig) -> str | None:
    """None: quantise. Otherwise why not; empty where nothing suggested to."""
    components = module.split(".")
    if config.format is NumberFormat.bf16 or not any(target in components for target in config.targets):
        return ""
    if any(component in NEVER for component in components):
        return ""
    for entry in config.ignore:
        if _matches(entry, module, components):
            return f"quantization.ignore names it ({entry})"
    group = FORMATS[config.format].GROUP
    if shape is not None and shape[1] % group:
        return f"its {shape[1]} inputs are no multiple of the group of {group}"
    return None


def _matches(entry: str, module: str, components: list[str]) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry == module or entry in components


def _refuse_fused_experts(source: Source) -> None:
    for name in source.names():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")) and len(source.shape(name)) == 3:
            raise CheckpointError(
                f"{name} holds all experts in one tensor; save the checkpoint with one tensor per expert "
                "(mlp.experts.0.gate_proj.weight and so on), as engines read it"
            )


def _check_fused(quantized: set[str], plain: list[str]) -> None:
    for module in plain:
        for sibling in siblings(module):
            if sibling in quantized:
                raise ConfigError(
                    f"{module} would stay in bfloat16 and {sibling} be quantised, but engines fuse the two; "
                    "name both or neither in quantization.ignore"
                )


def _components(source: Source) -> list[str]:
    return sorted({part for module in source.modules() for part in module.split(".")[:-1] if not part.isdigit()})
