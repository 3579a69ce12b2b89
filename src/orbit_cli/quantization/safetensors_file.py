"""One safetensors file: its header read and checked without torch, its tensors read one by one.

Left out: which files make a checkpoint (checkpoint.py) and what a tensor means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from orbit_cli.errors import CheckpointError

if TYPE_CHECKING:
    import torch  # safetensors brings it in when a tensor is read

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """What a header says of one tensor."""

    dtype: str  # safetensors' name, for example BF16
    shape: tuple[int, ...]
    nbytes: int
    start: int  # of its bytes in the file


class SafetensorsFile:
    """A checked file. Raises CheckpointError if it is missing, truncated or no safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos = _read_header(path)  # by tensor name
        self._handle = None

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now."""
        try:
            if self._handle is None:
                self._handle = safe_open(str(self.path), framework="pt")
            return self._handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read ({error}); copy it again") from error

    def raw_bytes(self, name: str) -> bytes:
        """The stored bytes of one tensor, whatever its dtype."""
        info = self.infos[name]
        with self.path.open("rb") as file:
            file.seek(info.start)
            return file.read(info.nbytes)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{path} is truncated: {size} bytes do not hold its header; copy the file again")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete, copy it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); copy the file again") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON; copy the file again") from error
    infos, end = {}, 0
    for name, entry in _entries(header, path):
        start, stop = entry["data_offsets"]
        infos[name] = TensorInfo(
            dtype=entry["dtype"], shape=tuple(entry["shape"]), nbytes=stop - start, start=8 + length + start
        )
        expected = math.prod(entry["shape"]) * ITEM_BITS.get(entry["dtype"], 0) // 8
        if entry["dtype"] in ITEM_BITS and stop - start != expected:
            raise CheckpointError(f"{path}: tensor {name} has {stop - start} bytes for {expected}; the file is damaged")
        end = max(end, stop)
    if size != 8 + length + end:
        raise CheckpointError(f"{path} is truncated: {size} bytes, its header says {8 + length + end}; copy it again")
    return infos


def _entries(header: object, path: Path) -> Iterator[tuple[str, dict]]:
    """(name, entry) of each tensor, every entry with its three fields. Raises CheckpointError for anything else."""
    named = header.items() if isinstance(header, dict) else [("header", header)]
    for name, entry in named:
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or not _describes_a_tensor(entry):
            raise CheckpointError(f"{path} is damaged: {name} in its header describes no tensor; copy the file again")
        yield name, entry


def _describes_a_tensor(entry: dict) -> bool:
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    sizes = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 else [-1]
    return isinstance(entry.get("dtype"), str) and all(isinstance(size, int) and size >= 0 for size in sizes)
