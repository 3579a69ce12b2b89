"""A checkpoint folder as far as file headers go: config.json, shards, tensor names and sizes, tokenizer. No torch.

What a plan and the run itself refuse of a folder is said here, once. Left out: tensors and formats (checkpoint.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.safetensors_file import SafetensorsFile

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "tiktoken.model", "vocab.json", "vocab.txt")


class CheckpointFolder:
    """The files of a checkpoint, checked.

    Raises CheckpointError if the folder, its config.json or a shard is missing, damaged or truncated, if it holds no
    tensor, and if the index names a tensor that its shard lacks.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()
        self.config: dict[str, Any] = _read_json(self.path / "config.json", self.path)
        self._files = {name: SafetensorsFile(self.path / name) for name in shard_names(self.path)}
        self._file_of = {tensor: name for name, file in self._files.items() for tensor in file.infos}
        self._check_index()
        if not self._file_of:
            raise CheckpointError(f"{self.path} holds no tensor in {', '.join(self._files)}; copy the files again")

    def _check_index(self) -> None:
        index = self.path / INDEX_NAME
        if len(self._files) == 1 and not index.exists():
            return
        for tensor, shard in _weight_map(self.path).items():
            if tensor not in self._files[shard].infos:
                raise CheckpointError(
                    f"{self.path / shard} lacks {tensor}, which {INDEX_NAME} says it has; copy it again"
                )


def check_tokenizer(folder: Path | str, config_field: str) -> None:
    """Refuse a folder without a tokenizer's files, of `config_field` as it is set. Raises CheckpointError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{config_field}={folder} is no folder; set it to a folder with tokenizer files")
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{config_field}={folder} has no tokenizer file ({', '.join(TOKENIZERS)}); copy them there, or set "
            "model.tokenizer to a folder that has them"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds the vocabulary of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZERS) or any(folder.glob("*.tiktoken"))


def shard_names(path: Path) -> list[str]:
    """File names of a checkpoint's shards, sorted. Raises CheckpointError if there are none."""
    index = path / INDEX_NAME
    if index.exists():
        return sorted(set(_weight_map(path).values()))
    if (path / SINGLE_NAME).exists():
        return [SINGLE_NAME]
    raise CheckpointError(
        f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}; "
        "set the path to a Hugging Face folder with safetensors files"
    )


def _weight_map(path: Path) -> dict[str, str]:
    """Shard of each tensor, as the index says. Raises CheckpointError if it does not say it."""
    found = _read_json(path / INDEX_NAME, path).get("weight_map")
    if not found or not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        said = "has no weight_map" if not found else "has a weight_map that names no file for each tensor"
        raise CheckpointError(f"{path / INDEX_NAME} {said}; the checkpoint is damaged, copy it again")
    return found


def _read_json(path: Path, folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; set the path to a Hugging Face checkpoint folder")
    try:
        return read_mapping(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {path.name}; it is no complete Hugging Face checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); copy the file again") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises CheckpointError if it holds none, OSError if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy the file again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no mapping; copy the file again")
    return found
