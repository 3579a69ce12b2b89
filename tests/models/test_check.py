"""A folder that is not the model of its config.json is refused from config and headers, with what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import random_model, write_checkpoint

from orbit_cli.config.schema.base import ModelConfig, ModelSource, NumberFormat, QuantizationConfig
from orbit_cli.errors import CheckpointError, UserError
from orbit_cli.models.check import check_checkpoint
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.runs.quantize import quantize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "source", random_model("qwen3"), NumberFormat.int4)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def edit(folder: Path, **fields: object) -> None:
    content = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(content))


WRONG = [
    ({"rms_norm_eps": "abc"}, r"config\.json cannot be used: Field 'rms_norm_eps' expected float, got str"),
    ({"hidden_size": "64"}, "'hidden_size' expected int, got str"),
    ({"rope_parameters": "x"}, "'rope_parameters' with value 'x'"),
    ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}, r"`num_hidden_layers` \(3\)"),
    ({"num_hidden_layers": 1, "layer_types": ["full_attention"] * 2}, r"`num_hidden_layers` \(1\)"),
    ({"num_attention_heads": 0}, "num_attention_heads=0 cannot be computed with"),
    ({"hidden_act": "silly"}, "transformers does not know hidden_act='silly'"),
    ({"num_attention_heads": 3}, r"o_proj has shape \[64, 128\] in .* config\.json makes it \[64, 96\]"),
    ({"hidden_size": 128}, r"lm_head has shape \[96, 64\]"),
    ({"num_hidden_layers": 3}, r"lacks model\.layers\.2\."),
    ({"quantization_config": {}}, "is quantised but config.json has no quantization_config"),
    ({"quantization_config": "int4"}, "something unknown, which cannot be used"),
]


@pytest.mark.parametrize(("fields", "told"), WRONG)
def test_the_field_or_tensor_is_named(folder: Path, tmp_path: Path, fields: dict, told: str) -> None:
    edit(folder, **fields)
    model = ModelConfig(name="x", source=ModelSource.checkpoint, path=str(folder))
    settings = QuantizationConfig(cache_dir=str(tmp_path / "cache"))
    for act in (
        lambda: check_checkpoint(CheckpointReader(folder)),
        lambda: prepare_base(model, settings, check=check_checkpoint),
        lambda: quantize(folder, tmp_path / "out", settings, lambda progress: None),
    ):
        with pytest.raises(CheckpointError, match=told) as raised:
            act()
        assert len(str(raised.value).splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("number_format", NumberFormat)
def test_every_family_in_every_format_passes(tmp_path: Path, model_type: str, number_format: NumberFormat) -> None:
    write_checkpoint(tmp_path, random_model(model_type), number_format)
    check_checkpoint(CheckpointReader(tmp_path))


def test_nothing_is_made_of_a_source_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        quantize(folder, tmp_path / "out", QuantizationConfig(), lambda progress: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_damaged_cached_base_is_named(folder: Path, tmp_path: Path) -> None:
    model = ModelConfig(name="x", source=ModelSource.checkpoint, path=str(folder))
    settings = QuantizationConfig(cache_dir=str(tmp_path / "cache"), format=NumberFormat.fp8)
    base = prepare_base(model, settings, lambda text: None, check_checkpoint)
    assert prepare_base(model, settings, check=check_checkpoint) == base
    (base / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"the cached base is damaged.*remove {base}"):
        prepare_base(model, settings, check=check_checkpoint)


def test_a_cache_that_cannot_be_made(folder: Path) -> None:
    model = ModelConfig(name="x", source=ModelSource.checkpoint, path=str(folder))
    settings = QuantizationConfig(cache_dir="/proc/none", format=NumberFormat.fp8)
    with pytest.raises(UserError, match=r"quantization\.cache_dir=/proc/none: .*cannot|no folder that can be written"):
        prepare_base(model, settings)
