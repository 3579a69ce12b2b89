"""What is damaged on disk is named in one sentence, and does not stand in the way of a new start."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orbit_cli.config.schema.base import QuantizationConfig
from orbit_cli.errors import CheckpointError, UserError
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.convert import quantize_checkpoint


def folder(root: Path) -> Path:
    root.mkdir()
    weight = {"model.layers.0.mlp.up_proj.weight": torch.randn(32, 64, dtype=torch.bfloat16)}
    save_file(weight, root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return root


HEADERS = [
    "[]",
    '{"a": {"dtype": "BF16", "shape": [1]}}',
    '{"a": 3}',
    '{"a": {"dtype": "BF16", "shape": "x", "data_offsets": [0, 2]}}',
    '{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [2]}}',
    '{"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 2]}}',
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_describes_no_tensor(tmp_path: Path, header: str) -> None:
    source = folder(tmp_path / "source")
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match="describes no tensor"):
        CheckpointReader(source)


@pytest.mark.parametrize("index", ['{"weight_map": 5}', '{"weight_map": {"a": 1}}', "[]", "{}"])
def test_an_index_that_names_no_files(tmp_path: Path, index: str) -> None:
    source = folder(tmp_path / "source")
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="weight_map|holds no mapping"):
        CheckpointReader(source)


def test_weights_that_are_a_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read .Is a directory"):
        CheckpointReader(source)


def test_a_config_that_is_no_mapping(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    (source / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no mapping"):
        CheckpointReader(source)


@pytest.mark.parametrize("state", ["{", "[]", '{"identity": 1}'])
def test_a_conversion_starts_anew_from_a_state_that_cannot_be_read(tmp_path: Path, state: str) -> None:
    partial = tmp_path / ".out.partial"
    (partial / "folder").mkdir(parents=True)
    (partial / "conversion.json").write_text(state)
    quantize_checkpoint(folder(tmp_path / "source"), tmp_path / "out", QuantizationConfig())
    assert CheckpointReader(tmp_path / "out").is_quantized("model.layers.0.mlp.up_proj")
    assert not partial.exists()


def test_an_output_where_no_folder_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="/proc is no folder that can be written to"):
        quantize_checkpoint(folder(tmp_path / "source"), "/proc/out", QuantizationConfig())


def test_only_the_folder_is_left(tmp_path: Path) -> None:
    quantize_checkpoint(folder(tmp_path / "source"), tmp_path / "out", QuantizationConfig())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_refused_source_leaves_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    weight = {"model.layers.0.mlp.up_proj.weight": torch.full((32, 64), torch.nan, dtype=torch.bfloat16)}
    save_file(weight, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj"):
        quantize_checkpoint(source, tmp_path / "out", QuantizationConfig())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_output_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no folder that can be written to"):
        quantize_checkpoint(folder(tmp_path / "source"), tmp_path / "file" / "out", QuantizationConfig())
