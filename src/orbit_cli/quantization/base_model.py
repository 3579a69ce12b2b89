"""The quantised base of a run: found, or made on first use and cached.

The cache folder is named after the content (source and settings), written atomically and by one process at a time, so
runs can share it and it can be deleted whenever no run is starting. Knows nothing of how the base is then used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from orbit_cli.config.schema.base import ModelConfig, ModelSource, NumberFormat, QuantizationConfig
from orbit_cli.errors import CheckpointError, ConfigError, writing
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.convert import quantize_checkpoint
from orbit_cli.quantization.files import file_sha256, folder_lock, make_folder
from orbit_cli.quantization.formats import quantization_section
from orbit_cli.quantization.gguf import shipped_smollm2
from orbit_cli.quantization.identity import base_checksum, settings_identity, source_identity
from orbit_cli.quantization.random_model import RANDOM_VERSION, write_random_checkpoint

__all__ = ["base_checksum", "base_origin", "packed_parts", "prepare_base"]


def prepare_base(
    model: ModelConfig,
    quantization: QuantizationConfig,
    notify: Callable[[str], None] = print,
    check: Callable[[CheckpointReader], None] = lambda reader: None,
) -> Path:
    """Folder of the base in the wanted format, as transformers and SGLang load it.

    A checkpoint that is already in that format is used in place, as is any checkpoint with quantization.format=bf16.
    Anything else is converted once into quantization.cache_dir. `check` may refuse a folder before it is used or
    converted. Raises ConfigError or CheckpointError for bad input, StorageError if the disk is full.
    """
    if model.source is ModelSource.checkpoint:
        if not model.path:
            raise ConfigError("model.source=checkpoint needs model.path; set it to a Hugging Face checkpoint folder")
        found = CheckpointReader(model.path)
        check(found)
        if quantization.format in (found.format, NumberFormat.bf16):
            return found.path
    cache = Path(quantization.cache_dir).expanduser().absolute() / "bases"
    base = cache / f"{model.name}-{quantization.format.value}-{_content_key(model, quantization)}"
    if base.exists():
        _check_cached(base, check)
        return base
    make_folder(cache, f"quantization.cache_dir={quantization.cache_dir}")
    with folder_lock(base.with_name(f"{base.name}.making"), wait=True):
        if not base.exists():
            _make(model, quantization, base, notify)
    return base


def base_origin(model: ModelConfig, quantization: QuantizationConfig, base: Path) -> str:
    """A line for people who have not this machine's cache: where the base that `prepare_base` gave comes from."""
    if model.source is ModelSource.random:
        return (
            f"The base has random weights: `orbit` makes {base.name} again from the run's config.yaml, on any machine."
        )
    published = f" (published as {model.repository})" if model.repository else ""
    if model.source is ModelSource.checkpoint and base == CheckpointReader(model.path).path:
        return f"The base is the checkpoint {base}{published}, used as it is."
    source = "smollm2" if model.source is ModelSource.smollm2 else str(Path(model.path).expanduser())
    command = shlex.join(["orbit", "quantize", source, base.name, *_settings(quantization)])
    return f"Elsewhere, make the base with `{command}`{published} and name that folder above."


def packed_parts(base: Path) -> frozenset[str]:
    """What of the base transformers finds packed (compressed-tensors, no `weight`): "linears", routed "experts".

    The fp8 of transformers itself keeps a `weight`, and is not among it.
    """
    reader = CheckpointReader(base)
    if (quantization_section(reader.config) or {}).get("quant_method") != "compressed-tensors":
        return frozenset()
    packed = filter(reader.is_quantized, reader.modules())
    return frozenset("experts" if ".experts." in module else "linears" for module in packed)


def _settings(quantization: QuantizationConfig) -> list[str]:
    """Overrides of what decides the base's bytes; lists only where they are not the default."""
    default = QuantizationConfig()
    found = [f"quantization.format={quantization.format.value}"]
    for name in ("targets", "ignore"):
        values = getattr(quantization, name)
        if values != getattr(default, name):
            plain = (value if re.fullmatch(r"[\w.]+", value) else f'"{value}"' for value in values)
            found.append(f"quantization.{name}=[{','.join(plain)}]")
    return found


def _check_cached(base: Path, check: Callable[[CheckpointReader], None]) -> None:
    try:
        check(CheckpointReader(base))
    except CheckpointError as error:
        raise CheckpointError(f"the cached base is damaged: {error}; remove {base}, and it is made again") from error


def _content_key(model: ModelConfig, quantization: QuantizationConfig) -> str:
    if model.source is ModelSource.checkpoint:
        source = source_identity(Path(model.path).expanduser())
    elif model.source is ModelSource.smollm2:
        source = source_identity(shipped_smollm2())
    else:
        fields = [RANDOM_VERSION, model.architecture, model.init_seed, model.init_scale, _tokenizer_identity(model)]
        source = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(f"{source}\n{settings_identity(quantization)}".encode()).hexdigest()[:16]


def _tokenizer_identity(model: ModelConfig) -> str | None:
    if model.tokenizer is None:
        return None
    folder = Path(model.tokenizer).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.tokenizer={model.tokenizer} is no folder; set it to a folder with tokenizer files")
    return json.dumps([[path.name, file_sha256(path)] for path in sorted(folder.glob("token*"))])


def _make(model: ModelConfig, quantization: QuantizationConfig, base: Path, notify: Callable[[str], None]) -> None:
    started = time.monotonic()
    notify(f"Preparing the {quantization.format.value} base of {model.name} (first use; kept in {base})")
    if model.source is not ModelSource.random:
        source = "smollm2" if model.source is ModelSource.smollm2 else model.path
        report = quantize_checkpoint(source, base, quantization)
    else:
        fresh = base.with_name(f".{base.name}.source")
        shutil.rmtree(fresh, ignore_errors=True)  # of a killed process; the lock is ours
        try:
            with writing(fresh):
                fresh.mkdir()
                write_random_checkpoint(model, fresh)
            if quantization.format is NumberFormat.bf16:
                os.replace(fresh, base)
                report = None
            else:
                report = quantize_checkpoint(fresh, base, quantization)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    seconds = time.monotonic() - started
    size = f", {report.bytes_before / 1e6:.0f} MB -> {report.bytes_after / 1e6:.0f} MB" if report else ""
    error = f", relative RMS error {report.relative_rms:.3f}" if report and report.quantized else ""
    notify(f"Base ready in {seconds:.0f} s{size}{error}")
