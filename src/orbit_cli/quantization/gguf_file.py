"""Parsing one GGUF file (version 2 and 3): its key-value fields and its tensors, decoded to float32.

Written for speed on token lists of 50,000 strings and for the block types that SmolLM2's file has; others are refused.
What the fields and tensors mean is in gguf.py. Format: ggml's docs/gguf.md; blocks: ggml-common.h.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orbit_cli.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Block types: number -> (name, weights in a block, bytes of a block)
_BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    kind: int  # block type
    shape: tuple[int, ...]  # slowest axis first, as in torch
    start: int  # of its bytes in the file
    nbytes: int


class GgufFile:
    """A parsed file. Raises CheckpointError if it is missing, truncated or has blocks that cannot be decoded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file() or path.stat().st_size < 24:
            raise CheckpointError(f"{path} is missing or empty; set the path to a GGUF file")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            magic, version, tensor_count, field_count = self._unpack("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise CheckpointError(f"{path} is no GGUF file of version 2 or 3; set the path to one")
            self.fields: dict[str, Any] = dict(self._field() for _ in range(field_count))
            infos = [self._tensor_info() for _ in range(tensor_count)]
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise CheckpointError(f"{path} is truncated or damaged in its header; copy the file again") from error
        alignment = self.fields.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, data + offset) for name, shape, kind, offset in infos}

    def decode(self, name: str) -> torch.Tensor:
        """One tensor as float32."""
        tensor = self.tensors[name]
        kind, weights, nbytes = _BLOCKS[tensor.kind]
        raw = torch.frombuffer(bytearray(self._bytes[tensor.start : tensor.start + tensor.nbytes]), dtype=torch.uint8)
        blocks = raw.view(-1, nbytes)  # [blocks, bytes]
        if weights == 1:
            stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
            return raw.view(stored).float().view(tensor.shape)
        scale = blocks[:, :2].contiguous().view(torch.float16).float()  # [blocks, 1]
        if kind == "Q8_0":
            values = blocks[:, 2:].contiguous().view(torch.int8).float() * scale
        elif kind == "Q4_0":
            values = (_half_nibbles(blocks[:, 2:]).float() - 8) * scale
        else:  # Q4_1
            low = blocks[:, 2:4].contiguous().view(torch.float16).float()  # [blocks, 1], value of code 0
            values = _half_nibbles(blocks[:, 4:]).float() * scale + low
        return values.view(tensor.shape)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        if kind not in _BLOCKS:
            known = ", ".join(block[0] for block in _BLOCKS.values())
            raise CheckpointError(f"{self.path}: tensor {name} has GGUF block type {kind}; only {known} can be decoded")
        _, weights, block_bytes = _BLOCKS[kind]
        nbytes = math.prod(shape) // weights * block_bytes
        if start + nbytes > len(self._bytes):
            raise CheckpointError(f"{self.path} is truncated: tensor {name} ends beyond the file; copy the file again")
        return GgufTensor(kind=kind, shape=shape, start=start, nbytes=nbytes)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._bytes):
            raise IndexError
        return self._bytes[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("IQ")
            if item in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise IndexError
        return self._unpack(_SCALARS[kind])[0]

    def _field(self) -> tuple[str, Any]:
        name = self._string()
        (kind,) = self._unpack("I")
        return name, self._value(kind)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (axes,) = self._unpack("I")
        shape = self._unpack(f"{axes}Q")[::-1]  # the file lists the fastest axis first
        kind, offset = self._unpack("IQ")
        return name, shape, kind, offset


def _half_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes [blocks, 32] of bytes [blocks, 16]: low nibbles are the first half of a block, high nibbles the second."""
    return torch.cat((packed & 15, packed >> 4), 1)
