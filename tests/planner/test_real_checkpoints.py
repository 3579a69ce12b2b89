"""The planner against checkpoints that exist: bases made here, sized from the config and from their own config.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.planner.model import read_model
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.quantization.checkpoint import CheckpointReader

CASES = [
    ("model=tiny_dense", "quantization=int4"),
    ("model=tiny_moe", "quantization=int4"),
    ("model=tiny_moe", "quantization=mxfp4"),
    ("model=tiny_moe", "quantization=fp8"),
    ("model=tiny_mla_moe", "quantization=int4_experts"),
    ("model=tiny_mla_moe", "quantization=nvfp4"),
    ("model=tiny_mla_moe", "quantization=bf16"),
]


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_bytes_of_a_base_that_is_made_here(overrides: tuple[str, str], tmp_path: Path) -> None:
    config = compose([*overrides, f"quantization.cache_dir={tmp_path}"])
    reader = CheckpointReader(prepare_base(config.model, config.quantization, lambda text: None))
    sizes = [reader.info(name) for name in reader.names()]
    written = sum(info.nbytes for info in sizes)
    assert read_model(config).base_bytes == written
    folder = compose(["model=checkpoint", f"model.path={reader.path}", overrides[1]])
    found = read_model(folder)
    assert found.base_bytes == pytest.approx(written, rel=1e-2)  # its own list of ignored modules, read back
    assert found.shape.parameters == read_model(config).shape.parameters
