"""The facts of the model that a config names: its published architecture, or the config.json of its checkpoint folder.

Where both are there they must agree: a folder that is another model is told by the first field that differs. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from orbit_cli.config.locate import conf_dir, group_options
from orbit_cli.config.schema.base import ModelConfig, ModelSource
from orbit_cli.errors import CheckpointError, ConfigError
from orbit_cli.planner.facts import Facts
from orbit_cli.quantization.folder import INDEX_NAME, CheckpointFolder, check_tokenizer, read_mapping

# Not compared: these say how files are written or read, and revisions of one model differ in them.
_LOOSE = ("ignore", "transformers_version", "torch_dtype", "dtype")
_MISSING = object()


def facts_of(model: ModelConfig) -> Facts:
    """Facts for planning. Raises ConfigError if there are none, CheckpointError for a folder that is another model."""
    if model.source is ModelSource.checkpoint and model.path:
        found = read_config(model)
        check_same(model, found)
        return Facts(found, str(Path(model.path) / "config.json"))
    if not model.architecture:
        raise ConfigError(
            f"model={model.name} has neither model.path nor model.architecture, so there is nothing to plan with; set "
            f"model.path to {wanted(model)}"
        )
    return Facts(model.architecture, f"model.architecture of {model.name}")


def wanted(model: ModelConfig) -> str:
    """What model.path is to be set to, with the command that makes one where there is one."""
    made = f", as `{model.made_by} FOLDER` makes it" if model.made_by else ""
    return f"a Hugging Face checkpoint folder{made}"


def check_files(model: ModelConfig, *, config_suffices: bool = False) -> None:
    """Refuse a checkpoint folder that its run would refuse: weights or tokenizer missing, damaged or truncated.

    With `config_suffices` a folder of a config.json without weights passes. Reads headers alone, milliseconds. Raises
    CheckpointError.
    """
    if model.tokenizer:
        check_tokenizer(model.tokenizer, "model.tokenizer")
    if config_suffices and is_config_alone(model):
        return
    if model.source is ModelSource.checkpoint and model.path:
        CheckpointFolder(model.path)
        if not model.tokenizer:
            check_tokenizer(model.path, "model.path")


def is_config_alone(model: ModelConfig) -> bool:
    """Whether model.path has a config.json and no weights, as before a download."""
    if model.source is not ModelSource.checkpoint or not model.path:
        return False
    folder = Path(model.path).expanduser()
    has_weights = (folder / INDEX_NAME).exists() or any(folder.glob("*.safetensors"))
    return (folder / "config.json").is_file() and not has_weights


def own_config(model: ModelConfig) -> str | None:
    """The overrides that name a checkpoint folder's own config in conf/model; None if there is none, or it is used."""
    if model.source is not ModelSource.checkpoint or not model.path or model.architecture:
        return None
    found = read_config(model)
    for name in group_options("model"):
        values = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
        values = values.get("model", values)
        leaves = dict(_leaves(values.get("architecture") or {}, ""))
        same = [_equal(_at(found, key), leaves[key]) for key in _telling(leaves)]
        if values.get("repository") and same and all(same):
            return f"model={name} model.path={model.path}"
    return None


def _telling(leaves: Mapping[str, Any]) -> list[str]:
    """The keys by which models are told apart."""
    ends = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    return [key for key in leaves if key.rpartition(".")[2] in ends and not key.startswith("vision")]


def read_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the checkpoint folder. Raises CheckpointError if it is not there or is none."""
    folder = Path(str(model.path)).expanduser()
    try:
        return read_mapping(folder / "config.json")
    except OSError as error:
        what = "has no config.json" if os.path.isdir(folder) else "is no folder"
        where = f"of {model.repository}" if model.repository else "in the Hugging Face format"
        make = f"make it with `{model.made_by} {model.path}`, or " if model.made_by else ""
        raise CheckpointError(f"model.path={model.path} {what}; {make}set it to a checkpoint folder {where}") from error


def check_same(model: ModelConfig, found: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming the first field of the folder's config.json that differs from the published one."""
    for path, wanted in _leaves(model.architecture, ""):
        have = _at(found, path)
        # A key that is absent is no difference: other versions of transformers write other keys.
        if have is _MISSING or path.rpartition(".")[2] in _LOOSE or _equal(have, wanted):
            continue
        what = f"its config.json has {path}={have!r} where {model.name} has {wanted!r}"
        published = f" (published as {model.repository})" if model.repository else ""
        raise CheckpointError(
            f"model.path={model.path} is not {model.name}: {what}; set model.path to a folder of {model.name}"
            f"{published}, or plan and train this one with model=checkpoint"
        )
    if model.architecture and "model_type" not in found:
        raise CheckpointError(f"{model.path}/config.json has no model_type, so it is no model's config; copy it again")


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value), model_type first: it says most."""
    for key in sorted(values, key=lambda name: name != "model_type"):
        path = f"{prefix}{key}"
        if isinstance(values[key], Mapping):
            yield from _leaves(values[key], f"{path}.")
        else:
            yield path, values[key]


def _at(values: Mapping[str, Any], path: str) -> Any:
    node: Any = values
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _MISSING
        node = node[part]
    return node


def _equal(have: Any, wanted: Any) -> bool:
    both_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (have, wanted))
    return float(have) == float(wanted) if both_numbers else have == wanted
