"""Typed reading of a config.json (or of model.architecture, which holds the same keys). No torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orbit_cli.errors import ConfigError

LARGEST = 1 << 40
MOST_LAYERS = 10_000  # a plan looks at every layer


class Facts:
    """The keys of one model's config, those of a nested text model first. Missing or odd ones are named in a sentence.

    >>> Facts({"model_type": "qwen3", "hidden_size": 2560}, "config.json").whole("hidden_size")
    2560
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.model_type = str(config.get("model_type", ""))
        self.top = config
        self.text: Mapping[str, Any] = self.section("text_config") or config

    def section(self, key: str) -> Mapping[str, Any] | None:
        """A nested mapping, or None. Raises ConfigError for anything else."""
        value = self.top.get(key)
        if value is None or isinstance(value, Mapping):
            return value or None
        raise ConfigError(f"{self.where}: {key}={value!r} must be a mapping; copy the file again")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1 unless its default is 0; it must be there if it has none. Raises ConfigError."""
        value = self.text.get(key)
        if value is None:
            if default is None and key in self.text:
                raise ConfigError(f"{self.where}: {key}=null must be a whole number of at least 1; copy the file again")
            if default is None:
                raise ConfigError(
                    f"{self.where} has no {key}, without which a {self.model_type} cannot be sized; add it, or set "
                    "model.path to the complete checkpoint folder"
                )
            return default
        least = 0 if default == 0 else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise ConfigError(f"{self.where}: {key}={value!r} must be a whole number from {least} to {LARGEST:,}")
        if key == "num_hidden_layers" and value > MOST_LAYERS:
            raise ConfigError(f"{self.where}: {key}={value:,} is more than any model has; set at most {MOST_LAYERS:,}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.text.get(key, default))

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers. Raises ConfigError if it is missing or is none."""
        value = self.text.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ConfigError(f"{self.where}: {key} must be a list of whole numbers, found {value!r}")
        return value

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantization_config, at the top or in the text model's part (Kimi-K2.6 has it there)."""
        inner = self.text.get("quantization_config")
        if inner is not None and not isinstance(inner, Mapping):
            raise ConfigError(f"{self.where}: quantization_config={inner!r} must be a mapping; copy the file again")
        return self.section("quantization_config") or inner
