"""How the converter writes: atomic JSON and safetensors files, hashes, locks, copies of what is not weights."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from orbit_cli.errors import UserError, writing

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".tmp"}
_REWRITTEN = {"config.json", "model.safetensors.index.json", "report.json", "conversion.json"}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes it at the end, durably; nothing is left of it if that fails.

    Raises StorageError if the disk is full.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that a killed process leaves the old one or the new one."""
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file atomically and durably, readable as the umask allows (safetensors makes it 0600)."""
    with _replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
        temporary.chmod(mode)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and whatever else lies at the top of the folder but weights."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in _REWRITTEN:
            with writing(target / path.name):
                shutil.copyfile(path, target / path.name)


def make_folder(folder: Path, setting: str) -> None:
    """Make `folder`, if need be, and try that a file can be made in it. Raises UserError that names `setting`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{setting}: {folder} is no folder that can be written to ({error.strerror}); choose another"
        ) from error


@contextmanager
def folder_lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Only one process writes `folder`: an advisory lock beside it, which the system drops if the process dies.

    The lock's file goes with the lock. wait=False raises UserError if another process holds it.
    """
    path = folder.parent / f".{folder.name}.lock"
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise UserError(f"another process is writing {folder}; wait for it or choose another output") from error
            if not _is_still(file.fileno(), path):
                continue  # its last holder removed it; whoever comes next would lock another file
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_still(descriptor: int, path: Path) -> bool:
    """Does `path` name the open file?"""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
