"""The model families: which config class builds them, how their checkpoint names differ, what is skipped and refused.

A family is data: transformers has the architecture. Names inside the trainer are transformers' own; adapters and
messages use the checkpoint's (prefix included). Left out: reading and filling (build.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orbit_cli.errors import CheckpointError

EXPERT = re.compile(r"^(?P<module>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)$")
"""Path of one routed expert's linear in every family's checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What is particular about the checkpoints of one model_type."""

    architecture: str  # transformers' model_type that computes it
    prefix: str = ""  # of the text model's tensor names in the checkpoint
    nested: bool = False  # the text model's config is under text_config
    skipped: tuple[str, ...] = ()  # regexes of checkpoint tensors that the text policy does not use
    check: Callable[[dict[str, Any]], None] = lambda config: None

    def text_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """transformers' config fields of the text model, without any quantization_config. Raises CheckpointError."""
        text = config.get("text_config") if self.nested else config
        if not isinstance(text, dict):
            raise CheckpointError("config.json has no text_config, which holds the text model; copy the file again")
        text = dict(text)
        text.pop("quantization_config", None)
        text.pop("auto_map", None)
        text["model_type"] = self.architecture
        self.check(text)
        return text

    def skips(self, name: str, layers: int) -> bool:
        """Whether a checkpoint tensor is left out on purpose: other towers, stored rotary tables, layers beyond."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        beyond = re.match(re.escape(self.prefix) + r"model\.layers\.(\d+)\.", name)
        if beyond and int(beyond[1]) >= layers:  # multi-token prediction layers
            return True
        return any(re.match(pattern, name) for pattern in self.skipped)


def _check_sliding(config: dict[str, Any]) -> None:
    if config.get("use_sliding_window"):
        raise CheckpointError(
            "the checkpoint sets use_sliding_window, which is not supported; use a full-attention model"
        )


def _check_deepseek(config: dict[str, Any]) -> None:
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, only) != only:
            raise CheckpointError(
                f"the checkpoint's {key}={config[key]!r} is not DeepSeek-V3's {only!r}; use a V3 or Kimi-K2 checkpoint"
            )


FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="llama"),
    "qwen3": Family(architecture="qwen3", check=_check_sliding),
    "qwen3_moe": Family(architecture="qwen3_moe", check=_check_sliding),
    "deepseek_v3": Family(architecture="deepseek_v3", check=_check_deepseek),
    "kimi_k2": Family(architecture="deepseek_v3", check=_check_deepseek),
    "kimi_k25": Family(
        architecture="deepseek_v3",
        prefix="language_model.",
        nested=True,
        skipped=(r"vision_tower\.", r"mm_projector\."),
        check=_check_deepseek,
    ),
}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint's config.json. Raises CheckpointError for an unsupported model_type."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} in config.json is not supported; supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
