"""The streaming converter behind `orbit quantize`: a checkpoint in, a quantised checkpoint out.

Shard by shard, so that the peak memory is about one output shard and one tensor. Everything is written into a hidden
folder `.NAME.partial` beside the output and renamed at the end, so no folder ever looks complete that is not. A later
call with the same source and settings reuses the shards that a killed one finished, after checking their sha256.
What is quantised is decided in selection.py, how a number is encoded in the format modules.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from orbit_cli.config.schema.base import NumberFormat, QuantizationConfig
from orbit_cli.errors import CheckpointError, UserError, writing
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.files import (
    copy_side_files,
    file_sha256,
    folder_lock,
    make_folder,
    save_tensors,
    write_json,
)
from orbit_cli.quantization.folder import INDEX_NAME
from orbit_cli.quantization.formats import FORMATS, quantization_config
from orbit_cli.quantization.gguf import GgufReader, shipped_smollm2
from orbit_cli.quantization.identity import conversion_identity
from orbit_cli.quantization.selection import Selection, fused_names, select, siblings
from orbit_cli.quantization.tensor import QuantizationError, QuantizedTensor, measure_error

STATE_NAME = "conversion.json"
REPORT_NAME = "report.json"

Reader = CheckpointReader | GgufReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a conversion stands; sent after every source tensor."""

    shard: int  # counted from 1
    shards: int
    tensor: str
    bytes_done: int  # of the source
    bytes_total: int
    elapsed_s: float

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the mean speed so far; None before anything is done."""
        if not self.bytes_done:
            return None
        return self.elapsed_s * (self.bytes_total - self.bytes_done) / self.bytes_done


@dataclass(kw_only=True, slots=True)
class QuantizationReport:
    """What a conversion did; report.json in the output folder holds the same."""

    source: str
    output: str
    format: str
    bytes_before: int = 0  # of the source's tensors
    bytes_after: int = 0
    quantized: int = 0  # linears encoded
    copied: int = 0  # linears copied byte for byte
    relative_rms: float = 0.0  # over all encoded weights
    max_abs: float = 0.0
    kept: dict[str, str] = field(default_factory=dict)  # linears left in bfloat16 -> why
    modules: dict[str, dict[str, float]] = field(default_factory=dict)  # encoded -> relative_rms, max_abs


@dataclass(kw_only=True, slots=True)
class _ShardRecord:
    """What is remembered of a finished shard."""

    sha256: str
    tensors: dict[str, int]  # name -> bytes
    source_bytes: int
    errors: dict[str, dict[str, float]]  # module -> fields of QuantizationError


def quantize_checkpoint(
    source: Path | str,
    output: Path | str,
    config: QuantizationConfig,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    check: Callable[[Reader], None] = lambda reader: None,
) -> QuantizationReport:
    """Quantise a Hugging Face folder or a GGUF file into the new folder `output`; source "smollm2": the shipped GGUF.

    Tensors already in the target format are copied byte for byte. `check` may refuse the source before anything is
    made. Raises UserError if `output` exists, cannot be made or another process writes it, CheckpointError for a source
    that is damaged or holds numbers that cannot be stored, StorageError if the disk is full; finished shards are kept
    for the next call then.
    """
    output = Path(output).expanduser().absolute()
    reader = open_source(source)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already and is not overwritten; choose another output or remove it")
    selection = select(reader, config)
    check(reader)
    make_folder(output.parent, f"output {output}")
    with folder_lock(output):
        return _Conversion(reader, output, config, selection, on_progress).run()


def open_source(source: Path | str) -> Reader:
    """The reader for a source: "smollm2", a .gguf file or a Hugging Face folder."""
    if str(source) == "smollm2":
        return GgufReader(shipped_smollm2())
    path = Path(source).expanduser()
    return GgufReader(path) if path.suffix == ".gguf" else CheckpointReader(path)


class _Conversion:
    """One run of the converter: the partial folder, the shards in turn, the side files, the rename."""

    def __init__(
        self,
        reader: Reader,
        output: Path,
        config: QuantizationConfig,
        selection: Selection,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.reader, self.output, self.config, self.selection = reader, output, config, selection
        self.on_progress = on_progress
        self.partial = output.parent / f".{output.name}.partial"
        self.identity = conversion_identity(reader.path, config)
        self.shards = list(reader.shards())
        self.bytes_total = sum(reader.info(name).nbytes for _, names in self.shards for name in names)
        self.bytes_done = 0
        self.started = time.monotonic()
        self.amax: dict[str, float] = {}  # NVFP4: first fused sibling -> amax over all of them

    def run(self) -> QuantizationReport:
        try:
            return self._convert()
        except UserError:
            shutil.rmtree(self.partial, ignore_errors=True)  # the same source would be refused again
            raise
        except BaseException:
            if not (self.partial / STATE_NAME).exists():
                shutil.rmtree(self.partial, ignore_errors=True)  # no shard is finished
            raise

    def _convert(self) -> QuantizationReport:
        with writing(self.partial):
            records = self._resume()
        for number, (file, names) in enumerate(self.shards, 1):
            if file not in records:
                records[file] = self._convert_shard(number, file, names)
                self._save_state(records)
            else:
                self.bytes_done += records[file].source_bytes
        records = {file: records[file] for file, _ in self.shards}  # sums in the same order, resumed or not
        report = self._report(records)
        self._write_rest(records, report)
        (self.partial / STATE_NAME).unlink()
        os.replace(self.partial, self.output)
        return report

    def _resume(self) -> dict[str, _ShardRecord]:
        """Finished shards of an earlier call that are whole; everything else in the partial folder goes."""
        state_path = self.partial / STATE_NAME
        records: dict[str, _ShardRecord] = {}
        if state_path.exists():
            try:
                state = json.loads(state_path.read_text())
                written = state["shards"] if state["identity"] == self.identity else {}
                kept = {file: _ShardRecord(**entry) for file, entry in written.items()}
            except (ValueError, KeyError, TypeError, AttributeError):  # a state that cannot be read is none
                kept = {}
            for file, record in kept.items():
                path = self.partial / file
                if path.exists() and file_sha256(path) == record.sha256:
                    records[file] = record
        self.partial.mkdir(exist_ok=True)
        for path in self.partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in records and path.name != STATE_NAME:
                path.unlink()
        return records

    def _save_state(self, records: dict[str, _ShardRecord]) -> None:
        state = {"identity": self.identity, "shards": {file: asdict(record) for file, record in records.items()}}
        write_json(self.partial / STATE_NAME, state)

    def _convert_shard(self, number: int, file: str, names: list[str]) -> _ShardRecord:
        tensors: dict[str, torch.Tensor] = {}
        errors: dict[str, dict[str, float]] = {}
        for name in names:
            self._convert_tensor(name, tensors, errors)
            self.bytes_done += self.reader.info(name).nbytes
            self.on_progress(
                Progress(
                    shard=number,
                    shards=len(self.shards),
                    tensor=name,
                    bytes_done=self.bytes_done,
                    bytes_total=self.bytes_total,
                    elapsed_s=time.monotonic() - self.started,
                )
            )
        save_tensors(tensors, self.partial / file)
        return _ShardRecord(
            sha256=file_sha256(self.partial / file),
            tensors={name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()},
            source_bytes=sum(self.reader.info(name).nbytes for name in names),
            errors=errors,
        )

    def _convert_tensor(self, name: str, tensors: dict[str, torch.Tensor], errors: dict[str, dict[str, float]]) -> None:
        """Add to `tensors` what becomes of one source tensor; the parts of a quantised linear go with its codes."""
        module, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "weight_packed"):
            quantized_part = self.reader.is_quantized(module) and name in self.reader.part_names(module)
            if not quantized_part:
                tensors[name] = self.reader.tensor(name)
        elif module in self.selection.copy:
            self.reader.linear(module)  # for its checks
            for part, target in zip(self.reader.part_names(module), self._suffixes(), strict=True):
                tensors[f"{module}.{target}"] = self.reader.tensor(part)
        elif module in self.selection.encode:
            weight = self._plain(self.reader.linear(module), torch.float32)
            encoded = self._encode(module, weight)
            errors[module] = asdict(measure_error(weight, encoded))
            parts = FORMATS[self.config.format].to_checkpoint(encoded)
            tensors.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
        elif self.reader.is_quantized(module):
            tensors[f"{module}.weight"] = self._plain(self.reader.linear(module), torch.bfloat16)
        else:
            tensors[name] = self.reader.tensor(name)

    def _columns(self) -> set[int]:
        """Input sizes of the quantised linears; only FP8 asks, whose codes have the weight's own shape."""
        if self.config.format is not NumberFormat.fp8:
            return set()
        quantized = self.selection.encode | self.selection.copy
        return {self._shape(module)[1] for module in quantized}

    def _shape(self, module: str) -> tuple[int, int]:
        if self.reader.is_quantized(module):
            return self.reader.linear(module).shape
        return self.reader.shape(f"{module}.weight")

    def _suffixes(self) -> tuple[str, ...]:
        return FORMATS[self.config.format].SUFFIXES

    def _encode(self, module: str, weight: torch.Tensor) -> QuantizedTensor:
        name = f"{module}.weight"
        if self.config.format is NumberFormat.nvfp4:
            return FORMATS[self.config.format].quantize(weight, name, tensor_amax=self._fused_amax(module))
        return FORMATS[self.config.format].quantize(weight, name)

    def _fused_amax(self, module: str) -> float:
        """amax over the linears that engines fuse with this one; they must share one global scale."""
        members = [member for member in siblings(module) if member in self.selection.encode]
        if members[0] not in self.amax:
            amaxes = [self._plain(self.reader.linear(member), torch.float32).abs().max() for member in members]
            self.amax[members[0]] = torch.stack(amaxes).max().item()
        return self.amax[members[0]]

    @staticmethod
    def _plain(weight: QuantizedTensor | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)

    def _report(self, records: dict[str, _ShardRecord]) -> QuantizationReport:
        total = QuantizationError()
        report = QuantizationReport(
            source=str(self.reader.path),
            output=str(self.output),
            format=self.config.format.value,
            bytes_before=self.bytes_total,
            copied=len(self.selection.copy),
            kept=dict(sorted(self.selection.kept.items())),
        )
        for record in records.values():
            report.bytes_after += sum(record.tensors.values())
            for module, fields in record.errors.items():
                error = QuantizationError(**fields)
                total.add(error)
                report.modules[module] = {"relative_rms": error.relative_rms, "max_abs": error.max_abs}
        report.modules = dict(sorted(report.modules.items()))
        report.quantized, report.relative_rms, report.max_abs = len(report.modules), total.relative_rms, total.max_abs
        return report

    def _write_rest(self, records: dict[str, _ShardRecord], report: QuantizationReport) -> None:
        """Side files, index, report and, last, config.json."""
        if isinstance(self.reader, GgufReader):
            self.reader.write_side_files(self.partial)
        else:
            copy_side_files(self.reader.path, self.partial)
        if len(self.shards) > 1 or self.shards[0][0] != "model.safetensors":
            weight_map = {name: file for file, record in records.items() for name in record.tensors}
            index = {"metadata": {"total_size": report.bytes_after}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self.partial / INDEX_NAME, index)
        write_json(self.partial / REPORT_NAME, asdict(report))
        write_json(self.partial / "config.json", self._config())

    def _config(self) -> dict[str, Any]:
        config = {key: value for key, value in self.reader.config.items() if key != "quantization_config"}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
        if self.config.format is NumberFormat.bf16:
            return config
        heads = [] if "lm_head" in self.selection.plain else ["lm_head"]  # a tied head is a linear without a tensor
        ignore = [*self.selection.plain, *fused_names(self.selection.plain), *heads]
        config["quantization_config"] = quantization_config(self.config.format, ignore, self._columns())
        return config


def read_report(folder: Path) -> dict[str, Any]:
    """report.json of a converted folder. Raises CheckpointError if there is none."""
    path = folder / REPORT_NAME
    if not path.exists():
        raise CheckpointError(f"{folder} has no {REPORT_NAME}; it was not made by orbit quantize")
    return json.loads(path.read_text())
