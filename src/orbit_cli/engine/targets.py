"""Which linears of a checkpoint the engine can adapt, read from the checkpoint's config.json alone.

Trainer and engine ask the same function before anything is loaded, so that nothing is trained that cannot be served.
No torch, no SGLang. Left out: whether the shapes fit (the plugin checks them when the engine starts).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from orbit_cli.errors import ConfigError
from orbit_cli.types import AdapterSpec

_MLP = ("gate_proj", "up_proj", "down_proj")
_GROUPED_QUERY = ("q_proj", "k_proj", "v_proj", "o_proj", *_MLP)
_EXPERTS = ("gate_proj", "up_proj", "down_proj")

# Families whose layers were compared with transformers, and their linears by adapter name.
FAMILIES = {
    "llama": _GROUPED_QUERY,
    "qwen2": _GROUPED_QUERY,
    "qwen3": _GROUPED_QUERY,
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *_MLP),
    "kimi_k2": ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *_MLP),
}
_MOE = ("qwen3_moe", "deepseek_v3", "kimi_k2")
_MLA = ("deepseek_v3", "kimi_k2")


def supported_targets(checkpoint_config: dict[str, Any], kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(linears, projections of routed experts) that the engine adapts for this checkpoint and kind ("oft", "lora").

    Raises ConfigError for a model type that has not been compared with its reference.
    """
    model_type = checkpoint_config.get("model_type", "")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model type {model_type!r} has not been checked in the engine; use one of {', '.join(sorted(FAMILIES))}"
        )
    linears = FAMILIES[model_type]
    if model_type in _MLA:
        # The query side is one linear, or a down and an up projection.
        linears = (("q_a_proj", "q_b_proj") if checkpoint_config.get("q_lora_rank") else ("q_proj",)) + linears
        if kind == "lora":
            # Absorbed attention never forms k and v, to which kv_b_proj's low-rank sum would be added.
            linears = tuple(name for name in linears if name != "kv_b_proj")
    return linears, (_EXPERTS if model_type in _MOE else ())


def check_targets(checkpoint_config: dict[str, Any], spec: AdapterSpec) -> None:
    """Refuse a spec that this engine cannot serve. Raises ConfigError naming the target and what is accepted."""
    linears, experts = supported_targets(checkpoint_config, spec.kind)
    if checkpoint_config.get("model_type") == "qwen3_moe" and checkpoint_config.get("tie_word_embeddings"):
        # sglang/srt/models/qwen3_moe.py never ties lm_head: it would sample from weights that nothing loaded.
        raise ConfigError(
            "this qwen3_moe checkpoint has tie_word_embeddings=true, which SGLang 0.5.17 serves with an lm_head that "
            "is never loaded; use a checkpoint with an lm_head of its own and tie_word_embeddings=false"
        )
    if checkpoint_config.get("model_type") in _MLA and _quantises_attention(checkpoint_config):
        raise ConfigError(
            "this checkpoint quantises latent attention, which SGLang 0.5.17 cannot load (it reads plain q_b_proj and "
            "kv_b_proj); quantise the routed experts alone, as Kimi-K2 does: quantization.targets=[experts]"
        )
    model_type = checkpoint_config.get("model_type")
    problem = f"which the engine cannot serve as {spec.kind} on model type {model_type}"
    check_names("targets", spec.targets, linears, problem)
    check_names("expert_targets", spec.expert_targets, experts, problem)


def check_names(key: str, wanted: Sequence[str], accepted: Sequence[str], problem: str) -> None:
    """Raise ConfigError naming the first of adapter.`key` that is not accepted, the nearest name, and all of them."""
    for name in wanted:
        if name not in accepted:
            nearest = difflib.get_close_matches(name, accepted, n=1)
            near = f" (nearest: {nearest[0]})" if nearest else ""
            accepts = ", ".join(accepted) if accepted else "nothing: the model has no routed experts"
            raise ConfigError(f"adapter.{key} has {name!r}{near}, {problem}; accepted are {accepts}")


def _quantises_attention(checkpoint_config: dict[str, Any]) -> bool:
    """Whether a compressed-tensors checkpoint names no attention linear among those left as they are."""
    section = checkpoint_config.get("quantization_config")
    return section is not None and not any("self_attn" in entry for entry in section.get("ignore") or [])
