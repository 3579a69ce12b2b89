"""`orbit quantize`: refuse a source that nothing could be made of, then convert it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orbit_cli.config.schema.base import QuantizationConfig
from orbit_cli.errors import CheckpointError, StorageError
from orbit_cli.models.check import check_known
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.convert import Progress, QuantizationReport, Reader, quantize_checkpoint
from orbit_cli.quantization.folder import has_tokenizer


def quantize(
    source: Path, output: Path, config: QuantizationConfig, on_progress: Callable[[Progress], None]
) -> QuantizationReport:
    """As `quantize_checkpoint`. Raises CheckpointError for a source that could not be served from `output` either."""
    try:
        return quantize_checkpoint(source, output, config, on_progress, _check)
    except StorageError as error:
        raise StorageError(f"{error} and start it again with the same arguments") from error


def _check(reader: Reader) -> None:
    if not isinstance(reader, CheckpointReader):
        return  # a GGUF file: its reader makes config and tokenizer from what it has checked
    check_known(reader)
    if not has_tokenizer(reader.path):
        raise CheckpointError(
            f"{reader.path} has no tokenizer, so nothing made of it could be served; copy the model's tokenizer files "
            "into it (tokenizer.json, tokenizer_config.json and what else it was published with)"
        )
