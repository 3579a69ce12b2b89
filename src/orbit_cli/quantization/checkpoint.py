"""Reading Hugging Face checkpoint folders, lazily: config, tensor names, one tensor or one linear at a time.

Plain and quantised checkpoints, one file or many (model.safetensors.index.json). Nothing is loaded before it is asked
for, and everything that can be checked from headers is checked when the folder is opened.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.folder import CheckpointFolder
from orbit_cli.quantization.formats import FORMATS, format_of
from orbit_cli.quantization.safetensors_file import ITEM_BITS, SafetensorsFile, TensorInfo
from orbit_cli.quantization.tensor import QuantizedTensor


class CheckpointReader(CheckpointFolder):
    """A checkpoint folder.

    Raises CheckpointError if the folder, its config.json or a shard is missing or truncated, if the index names a
    tensor that its shard lacks, and if the checkpoint is quantised in a way that cannot be used.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.format: NumberFormat = format_of(self.config, str(self.path))
        self._check_parts()

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def has(self, name: str) -> bool:
        """Is there a tensor of this name?"""
        return name in self._file_of

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and bytes of a tensor, from the header alone."""
        return self._file(name).infos[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return self.info(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it is stored."""
        return self._file(name).tensor(name)

    def shards(self) -> Iterator[tuple[str, list[str]]]:
        """(file name, its tensor names in the file's order), in the order of file names."""
        for name in sorted(self._files):
            yield name, list(self._files[name].infos)

    def modules(self) -> list[str]:
        """Paths of all modules with a weight, plain or quantised, sorted."""
        suffixes = (".weight", ".weight_packed")
        return sorted({name.removesuffix(s) for name in self._file_of for s in suffixes if name.endswith(s)})

    def is_quantized(self, module: str) -> bool:
        """Does the file hold codes for this module? `module` is its path in the file."""
        if self.has(f"{module}.weight_packed"):
            return True
        return self.has(f"{module}.weight") and self.info(f"{module}.weight").dtype.startswith("F8")

    def linear_shape(self, module: str) -> tuple[int, ...]:
        """[out, in] of a linear, quantised or not, from headers alone."""
        if not self.has(f"{module}.weight_packed"):
            return self.shape(f"{module}.weight")
        packed = self.info(f"{module}.weight_packed")
        codes = ITEM_BITS.get(packed.dtype, 0) // 4  # of 4 bits
        return (*packed.shape[:-1], packed.shape[-1] * codes) if packed.shape else ()

    def linear(self, module: str) -> QuantizedTensor | torch.Tensor:
        """The weight of a linear [out, in], quantised if the file has it so. `module` is its path in the file.

        Raises CheckpointError if there is no such weight, a part is missing, or its scales are NaN, Inf or 0.
        """
        if not self.is_quantized(module):
            return self.tensor(f"{module}.weight")
        return FORMATS[self.format].from_checkpoint(self._parts(module), module)

    def part_names(self, module: str) -> list[str]:
        """Names of the tensors that make up a quantised module, in the order of the format's suffixes."""
        names = []
        for suffix in FORMATS[self.format].SUFFIXES:
            name = f"{module}.{suffix}"
            inverse = f"{module}.weight_scale_inv"  # DeepSeek's name for the same multiplier
            names.append(inverse if suffix == "weight_scale" and not self.has(name) and self.has(inverse) else name)
        return names

    def _parts(self, module: str) -> dict[str, torch.Tensor]:
        suffixes = FORMATS[self.format].SUFFIXES
        return {suffix: self.tensor(name) for suffix, name in zip(suffixes, self.part_names(module), strict=True)}

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            near = difflib.get_close_matches(name, self._file_of, n=2)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise CheckpointError(f"{self.path} has no tensor {name}{hint}")
        return self._files[self._file_of[name]]

    def _check_parts(self) -> None:
        """Every quantised module is of the format that config.json declares, and has all its parts."""
        for module in self.modules():
            if not self.is_quantized(module):
                continue
            if self.format is NumberFormat.bf16:
                raise CheckpointError(
                    f"{self.path}: {module} is quantised but config.json has no quantization_config; "
                    "add the one it was made with"
                )
            lacking = [name for name in self.part_names(module) if not self.has(name)]
            if lacking:
                raise CheckpointError(
                    f"{self.path} lacks {lacking[0]}, a part of a linear in {self.format.value}, which config.json "
                    "declares; the files belong to different models"
                )
