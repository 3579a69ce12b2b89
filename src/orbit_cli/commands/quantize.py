"""`orbit quantize`: a checkpoint in, a quantised checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orbit_cli.commands.options import Cfg, Overrides, load_config
from orbit_cli.errors import UserError


def quantize(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder or GGUF file; smollm2 is the shipped GGUF.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; it appears when it is complete.")],
    overrides: Overrides = None,
    cfg: Cfg = None,
) -> None:
    """Quantise a checkpoint, shard by shard, into a folder that transformers and SGLang load.

    A broken-off run is gone on with when it is started again with the same arguments.

    \b
    orbit quantize smollm2 smollm2-int4
    orbit quantize /models/qwen3-30b /models/qwen3-30b-nvfp4 quantization=nvfp4
    orbit quantize /models/x /models/x-int4 'quantization.ignore=[lm_head,shared_experts]'
    """
    for given in (source, output):
        if "=" in given.name and not given.exists():
            raise UserError(f"{given} is an override, but SOURCE and OUTPUT come first: orbit quantize SOURCE OUTPUT")
    config = load_config(overrides, cfg)
    from orbit_cli.planner.preflight import require_address_space

    require_address_space()
    from orbit_cli.commands.quantize_progress import QuantizeProgress, report_text
    from orbit_cli.runs.quantize import quantize as run_quantization

    with QuantizeProgress() as progress:
        report = run_quantization(source, output, config.quantization, progress.update)
    print(report_text(report))
