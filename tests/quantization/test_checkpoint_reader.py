"""Reading checkpoint folders: what is found, and one clear sentence for everything that can be wrong with one."""

import json

import pytest
import torch
from made_up_checkpoints import moe_tensors, write_checkpoint

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.formats import FORMATS, format_of, quantization_config
from orbit_cli.quantization.identity import base_checksum
from orbit_cli.quantization.tensor import QuantizedTensor


def test_names_shapes_and_tensors(source):
    reader, tensors = CheckpointReader(source), moe_tensors()
    assert reader.names() == sorted(tensors)
    assert reader.format is NumberFormat.bf16 and reader.config["model_type"] == "made_up"
    for name, tensor in tensors.items():
        assert reader.has(name) and reader.shape(name) == tuple(tensor.shape)
        assert torch.equal(reader.tensor(name), tensor)
    assert torch.equal(reader.linear("lm_head"), tensors["lm_head.weight"])
    assert sum(len(names) for _, names in reader.shards()) == len(tensors)


@pytest.mark.parametrize("number_format", list(FORMATS))
def test_quantised_linears(tmp_path, number_format):
    weight, module = torch.randn(64, 128), FORMATS[number_format]
    stored = {f"m.{suffix}": t for suffix, t in module.to_checkpoint(module.quantize(weight, "m")).items()}
    config = {"quantization_config": quantization_config(number_format, [], [128])}
    reader = CheckpointReader(write_checkpoint(tmp_path / "c", stored, **config))
    tensor = reader.linear("m")
    assert reader.format is number_format and isinstance(tensor, QuantizedTensor)
    assert torch.equal(tensor.dequantize(), module.quantize(weight, "m").dequantize())
    assert reader.is_quantized("m") and reader.modules() == ["m"]


def test_deepseek_names_of_fp8_scales(tmp_path):
    module = FORMATS[NumberFormat.fp8]
    tensor = module.quantize(torch.randn(130, 200), "m")
    stored = {"m.weight": tensor.packed, "m.weight_scale_inv": tensor.scale}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    reader = CheckpointReader(write_checkpoint(tmp_path / "c", stored, **config))
    assert torch.equal(reader.linear("m").dequantize(), tensor.dequantize())


def test_quantization_config_in_text_config(tmp_path):
    section = quantization_config(NumberFormat.int4, [], [])
    reader = CheckpointReader(
        write_checkpoint(tmp_path / "c", moe_tensors(), text_config={"quantization_config": section})
    )
    assert reader.format is NumberFormat.int4


@pytest.mark.parametrize(
    "change",
    [{"group_size": 128}, {"symmetric": False}, {"num_bits": 8}, {"actorder": "group"}, {"strategy": "channel"}],
)
def test_other_int4_schemes_are_refused(change):
    section = quantization_config(NumberFormat.int4, [], [])
    section["config_groups"]["group_0"]["weights"] |= change
    with pytest.raises(CheckpointError, match="here is quantised as quant_method=compressed-tensors.*groups of 32"):
        format_of({"quantization_config": section}, "here")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_methods_are_refused(method):
    with pytest.raises(CheckpointError, match=f"quant_method={method}"):
        format_of({"quantization_config": {"quant_method": method}}, "here")


def test_missing_tensor_names_the_nearest(source):
    with pytest.raises(CheckpointError, match="no tensor model.embed_token.weight; nearest: model.embed_tokens.weight"):
        CheckpointReader(source).tensor("model.embed_token.weight")


def test_missing_folder_and_files(tmp_path, source):
    with pytest.raises(CheckpointError, match="is no folder"):
        CheckpointReader(tmp_path / "nothing")
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is missing"):
        CheckpointReader(source)
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        CheckpointReader(source)
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config.json"):
        CheckpointReader(source)


@pytest.mark.parametrize("keep", [0, 7, 50, -1])
def test_truncated_shards_are_refused_before_anything_is_loaded(source, keep):
    shard = source / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is truncated"):
        CheckpointReader(source)


def test_a_file_that_is_no_safetensors_file(source):
    (source / "model-00001-of-00003.safetensors").write_bytes((9).to_bytes(8, "little") + b"not json!" + b"x" * 99)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        CheckpointReader(source)


def test_an_index_that_lies(source):
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks model.extra.weight"):
        CheckpointReader(source)


def test_checksum_ignores_sharding_and_sees_one_bit(tmp_path, source):
    single = write_checkpoint(tmp_path / "single", moe_tensors())
    assert base_checksum(single) == base_checksum(source)
    tensors = moe_tensors()
    tensors["model.layers.1.mlp.gate.weight"].view(torch.int16)[0, 0] ^= 1
    changed = write_checkpoint(tmp_path / "changed", tensors)
    assert base_checksum(changed) != base_checksum(source)
    renamed = moe_tensors()
    renamed["model.norm2.weight"] = renamed.pop("model.norm.weight")
    assert base_checksum(write_checkpoint(tmp_path / "renamed", renamed)) != base_checksum(source)
