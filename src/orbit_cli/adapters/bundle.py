"""A published adapter as bytes: its checksum, and the folder it is kept in.

The checksum is the one rule by which trainer and engine agree that they hold the same tensors. A version's folder has
two files, `tensors.safetensors` and `version.json`, and appears in one rename: it is complete or it is not there.
Left out: how the numbers come about (bank.py) and PEFT's file format (peft_io.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from orbit_cli.errors import CheckpointError
from orbit_cli.types import AdapterSpec, AdapterVersion

TENSORS_FILE = "tensors.safetensors"
VERSION_FILE = "version.json"
JOINED_BYTES = 1 << 26


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, as they lie in memory (little endian); copies only off-CPU tensors."""
    return memoryview(_as_bytes(tensor).cpu().numpy())


def checksum(tensors: dict[str, Tensor]) -> str:
    """sha256 (hex) over names, dtypes, shapes and bytes, in sorted name order. Device and strides do not matter."""
    digest = hashlib.sha256()
    names = sorted(tensors)
    for name, data in zip(names, host_bytes([tensors[name] for name in names]), strict=True):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}|{dtype}|{','.join(map(str, tensor.shape))}|".encode())
        digest.update(data)
    return digest.hexdigest()


def host_bytes(tensors: list[Tensor], join: int = JOINED_BYTES) -> Iterator[memoryview]:
    """`raw_bytes` of each. What lies on a GPU is joined there up to `join` bytes: an adapter is thousands of tensors,
    and each copy waits for the device."""
    waiting: list[Tensor] = []
    size = 0
    for tensor in tensors:
        piece = _as_bytes(tensor)
        if waiting and (piece.device != waiting[0].device or size + piece.numel() > join):
            yield from _joined(waiting)
            waiting, size = [], 0
        waiting.append(piece)
        size += piece.numel()
    yield from _joined(waiting)


def _joined(pieces: list[Tensor]) -> Iterator[memoryview]:
    """Bytes of each of the flat uint8 pieces; off the CPU by one copy of all."""
    if len(pieces) < 2 or pieces[0].device.type == "cpu":
        yield from (memoryview(piece.cpu().numpy()) for piece in pieces)
    else:
        whole = torch.cat(pieces).cpu().split([piece.numel() for piece in pieces])
        yield from (memoryview(piece.numpy()) for piece in whole)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def make_version(number: int, spec: AdapterSpec, tensors: dict[str, Tensor]) -> AdapterVersion:
    """An AdapterVersion of CPU bfloat16 tensors, with its checksum. Raises ValueError on any other dtype or device."""
    wrong = [name for name, t in tensors.items() if t.dtype is not torch.bfloat16 or t.device.type != "cpu"]
    if wrong:
        raise ValueError(f"an adapter version holds CPU bfloat16 tensors; {wrong[0]} is not one")
    return AdapterVersion(number=number, spec=spec, tensors=tensors, checksum=checksum(tensors))


def save_version(version: AdapterVersion, folder: Path) -> Path:
    """Write a version to `folder`, replacing what is there. The folder appears complete or not at all."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        save_file({name: t.contiguous() for name, t in version.tensors.items()}, partial / TENSORS_FILE)
        record = {"number": version.number, "checksum": version.checksum, "spec": dataclasses.asdict(version.spec)}
        (partial / VERSION_FILE).write_text(json.dumps(record, indent=1) + "\n")
        sync_files(partial)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_version(folder: Path) -> AdapterVersion:
    """Read a version back. Raises CheckpointError if a file is missing, unreadable or not what was saved."""
    folder = Path(folder)
    try:
        record = json.loads((folder / VERSION_FILE).read_text())
        tensors = load_file(folder / TENSORS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is no adapter version: {error}; point to a folder that orbit wrote") from error
    spec = {key: tuple(value) if isinstance(value, list) else value for key, value in record["spec"].items()}
    version = make_version(record["number"], AdapterSpec(**spec), tensors)
    if version.checksum != record["checksum"]:
        raise CheckpointError(
            f"{folder / TENSORS_FILE} has sha256 {version.checksum[:12]} but {record['checksum'][:12]} was saved; "
            "the file was altered, use another version"
        )
    return version


def sync_files(folder: Path) -> None:
    """Flush every file of a folder to the disk, so that the rename that follows publishes whole files."""
    for path in folder.iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())


def replace_folder(partial: Path, folder: Path) -> None:
    """Move `partial` to `folder`; an older folder of that name makes room first, since rename never replaces one."""
    if folder.exists():
        old = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.old"
        os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(partial, folder)
