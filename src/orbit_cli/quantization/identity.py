"""Names for content: which source and settings a conversion has, and a checksum of a finished base.

A checkpoint of hundreds of gigabytes cannot be hashed on every start, so a source is identified by its config and the
headers, sizes and times of its files; `base_checksum` reads every byte.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from orbit_cli.config.schema.base import QuantizationConfig
from orbit_cli.quantization.files import file_sha256
from orbit_cli.quantization.folder import shard_names
from orbit_cli.quantization.safetensors_file import SafetensorsFile

CONVERTER_VERSION = 2
"""Raised whenever the same source and settings give other bytes; cached bases of older versions are then not used."""


def source_identity(path: Path) -> str:
    """Hex digest that changes when a checkpoint folder's config or weight files do; a GGUF file is hashed whole."""
    if path.is_file():
        return file_sha256(path)
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for name in shard_names(path):
        stat = (path / name).stat()
        with (path / name).open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode())
        digest.update(header)
    return digest.hexdigest()


def settings_identity(config: QuantizationConfig) -> str:
    """The settings that decide the output's bytes, as one line."""
    return json.dumps([CONVERTER_VERSION, config.format.value, sorted(config.targets), sorted(config.ignore)])


def conversion_identity(source: Path, config: QuantizationConfig) -> str:
    """Hex digest of source and settings together."""
    return hashlib.sha256(f"{source_identity(source)}\n{settings_identity(config)}".encode()).hexdigest()


def base_checksum(path: Path | str) -> str:
    """Hex sha256 over all tensors of a checkpoint folder: name, dtype, shape and bytes, in sorted name order.

    Does not depend on how tensors are spread over files. Reads everything; computed when asked for, never kept.
    """
    path = Path(path)
    files = [SafetensorsFile(path / name) for name in shard_names(path)]
    owners = {name: file for file in files for name in file.infos}
    digest = hashlib.sha256()
    for name in sorted(owners):
        info = owners[name].infos[name]
        digest.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode())
        digest.update(owners[name].raw_bytes(name))
    return digest.hexdigest()
