"""How the converter writes: atomic JSON and safetensors files, hashes, locks, copies of what is not weights."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from orbit_cli.errors import UserError

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".tmp"}
_REWRITTEN = {"config.json", "model.safetensors.index.json", "report.json", "conversion.json"}


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that a killed process leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file atomically and durably, readable as the umask allows (safetensors makes it 0600)."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.touch()
    mode = temporary.stat().st_mode
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
    temporary.chmod(mode)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, path)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and whatever else lies at the top of the folder but weights."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in _REWRITTEN:
            shutil.copyfile(path, target / path.name)


@contextmanager
def folder_lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Only one process writes `folder`: an advisory lock beside it, which the system drops if the process dies.

    wait=False raises UserError if another process holds it.
    """
    path = folder.parent / f".{folder.name}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f"another process is writing {folder}; wait for it or choose another output") from error
        yield
