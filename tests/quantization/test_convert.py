"""The converter: what is quantised, what is copied, and that a killed run never leaves something that looks whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_up_checkpoints import EXPERTS, LAYERS, folder_bytes, moe_tensors, write_checkpoint

from orbit_cli.config.schema.base import NumberFormat, QuantizationConfig
from orbit_cli.errors import CheckpointError, ConfigError, UserError
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.convert import QuantizationReport, quantize_checkpoint, read_report
from orbit_cli.quantization.files import folder_lock
from orbit_cli.quantization.formats import FORMATS
from orbit_cli.quantization.tensor import QuantizedTensor

INT4 = QuantizationConfig(format=NumberFormat.int4)
LINEARS = LAYERS * (4 + 3 * EXPERTS)


@pytest.mark.parametrize("number_format", list(FORMATS))
def test_every_target_is_quantised_and_nothing_else(tmp_path, source, number_format):
    config = QuantizationConfig(format=number_format)
    report = quantize_checkpoint(source, tmp_path / "out", config)
    reader, original = CheckpointReader(tmp_path / "out"), moe_tensors()
    assert report.quantized == LINEARS == len(report.modules) and report.copied == 0 and not report.kept
    assert reader.format is number_format
    for name, tensor in original.items():
        module = name.removesuffix(".weight")
        if ".experts." in name or (".self_attn." in name and name.endswith(".weight")):
            quantized = reader.linear(module)
            assert isinstance(quantized, QuantizedTensor) and quantized.shape == tuple(tensor.shape)
            error = (quantized.dequantize() - tensor.float()).norm() / tensor.float().norm()
            assert error.item() == pytest.approx(report.modules[module]["relative_rms"], rel=1e-3)
            assert error < 0.15
        else:
            assert torch.equal(reader.tensor(name), tensor) and reader.tensor(name).dtype == tensor.dtype
    for side in ("generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / side).read_bytes() == (source / side).read_bytes()
    assert report.bytes_after < 0.75 * report.bytes_before
    assert read_report(tmp_path / "out")["relative_rms"] == report.relative_rms
    assert not list(tmp_path.glob(".out.partial"))


def test_config_names_what_engines_must_ignore(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "out", INT4)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(section["ignore"]) == {"lm_head"} | {f"model.layers.{i}.mlp.gate" for i in range(LAYERS)}
    assert section["format"] == "pack-quantized" and section["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_targets_and_ignore(tmp_path, source):
    config = QuantizationConfig(
        targets=["mlp"], ignore=["lm_head", r"re:model\.layers\.0\..*", "model.layers.1.mlp.experts.0.down_proj"]
    )
    report = quantize_checkpoint(source, tmp_path / "out", config)
    assert report.quantized == (LAYERS - 1) * 3 * EXPERTS - 1
    assert set(report.kept) == {
        *(f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in range(EXPERTS) for p in ("gate", "up", "down")),
        "model.layers.1.mlp.experts.0.down_proj",
    }
    assert all("quantization.ignore" in reason for reason in report.kept.values())
    assert isinstance(CheckpointReader(tmp_path / "out").linear("model.layers.0.self_attn.q_proj"), torch.Tensor)


def test_targets_that_match_nothing(tmp_path, source):
    with pytest.raises(ConfigError, match="atention.*matches no linear.*self_attn"):
        quantize_checkpoint(source, tmp_path / "out", QuantizationConfig(targets=["atention"]))
    assert not (tmp_path / "out").exists()


def test_fused_linears_must_not_part(tmp_path, source):
    config = QuantizationConfig(ignore=["model.layers.2.self_attn.k_proj"])
    with pytest.raises(ConfigError, match="k_proj would stay in bfloat16 and .*q_proj be quantised"):
        quantize_checkpoint(source, tmp_path / "out", config)


def test_inputs_that_do_not_divide_stay_and_are_reported(tmp_path):
    tensors = {"a.mlp.down_proj.weight": torch.randn(8, 40), "a.mlp.gate_proj.weight": torch.randn(8, 64)}
    report = quantize_checkpoint(write_checkpoint(tmp_path / "source", tensors), tmp_path / "out", INT4)
    assert report.kept == {"a.mlp.down_proj": "its 40 inputs are no multiple of the group of 32"}
    assert torch.equal(CheckpointReader(tmp_path / "out").linear("a.mlp.down_proj"), tensors["a.mlp.down_proj.weight"])


def test_nvfp4_shares_the_global_scale_among_fused_linears(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "out", QuantizationConfig(format=NumberFormat.nvfp4))
    reader, original = CheckpointReader(tmp_path / "out"), moe_tensors()
    prefix = "model.layers.1.self_attn"
    amax = max(original[f"{prefix}.{name}.weight"].abs().max().item() for name in ("q_proj", "k_proj", "v_proj"))
    scales = {reader.linear(f"{prefix}.{name}").global_scale.item() for name in ("q_proj", "k_proj", "v_proj")}
    assert len(scales) == 1 and scales.pop() == pytest.approx(448 * 6 / amax)
    assert (
        reader.linear(f"{prefix}.o_proj").global_scale.item() != reader.linear(f"{prefix}.q_proj").global_scale.item()
    )


def test_what_is_already_in_the_format_is_copied_byte_for_byte(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "experts", QuantizationConfig(targets=["mlp"]))
    report = quantize_checkpoint(tmp_path / "experts", tmp_path / "all", INT4)
    assert report.copied == LAYERS * 3 * EXPERTS and report.quantized == LAYERS * 4
    before, after = CheckpointReader(tmp_path / "experts"), CheckpointReader(tmp_path / "all")
    for name in before.names():
        if ".experts." in name:
            assert torch.equal(before.tensor(name), after.tensor(name))


def test_another_format_is_decoded_first(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "fp8", QuantizationConfig(format=NumberFormat.fp8))
    report = quantize_checkpoint(tmp_path / "fp8", tmp_path / "int4", INT4)
    name = "model.layers.0.mlp.experts.1.up_proj"
    decoded = CheckpointReader(tmp_path / "fp8").linear(name).dequantize()
    expected = FORMATS[NumberFormat.int4].quantize(decoded, name)
    assert torch.equal(CheckpointReader(tmp_path / "int4").linear(name).packed, expected.packed)
    assert report.quantized == LINEARS


def test_bf16_takes_a_quantised_checkpoint_apart(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "fp8", QuantizationConfig(format=NumberFormat.fp8))
    quantize_checkpoint(tmp_path / "fp8", tmp_path / "bf16", QuantizationConfig(format=NumberFormat.bf16))
    reader = CheckpointReader(tmp_path / "bf16")
    assert reader.format is NumberFormat.bf16 and reader.names() == sorted(moe_tensors())
    assert reader.tensor("model.layers.0.self_attn.q_proj.weight").dtype == torch.bfloat16


def test_nan_is_refused_by_name_and_leaves_no_output(tmp_path):
    tensors = moe_tensors()
    tensors["model.layers.2.mlp.experts.1.up_proj.weight"][3, 4] = float("nan")
    source = write_checkpoint(tmp_path / "source", tensors, shards=3)
    with pytest.raises(CheckpointError, match="model.layers.2.mlp.experts.1.up_proj.weight holds NaN"):
        quantize_checkpoint(source, tmp_path / "out", INT4)
    assert not (tmp_path / "out").exists()


def test_experts_in_one_tensor_are_refused(tmp_path):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 64, 64)}
    source = write_checkpoint(tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match="experts.gate_up_proj holds all experts in one tensor"):
        quantize_checkpoint(source, tmp_path / "out", INT4)


def test_an_existing_output_is_not_touched(tmp_path, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        quantize_checkpoint(source, tmp_path / "out", INT4)
    assert folder_bytes(tmp_path / "out") == {"precious": b"mine"}


def test_two_writers_of_one_output(tmp_path, source):
    with folder_lock(tmp_path / "out"), pytest.raises(UserError, match="another process is writing"):
        quantize_checkpoint(source, tmp_path / "out", INT4)


def test_progress_counts_every_byte(tmp_path, source):
    seen = []
    report = quantize_checkpoint(source, tmp_path / "out", INT4, seen.append)
    assert sorted(p.tensor for p in seen) == sorted(moe_tensors())
    assert seen[-1].bytes_done == seen[-1].bytes_total == report.bytes_before
    assert {p.shard for p in seen} == {1, 2, 3} and seen[0].shards == 3
    assert seen[-1].eta_s == 0 and seen[0].eta_s >= 0


class Stop(Exception):
    """Stands for anything that ends a conversion from inside."""


def stop_after(count: int):
    seen = []

    def on_progress(progress):
        seen.append(progress)
        if len(seen) == count:
            raise Stop

    return on_progress, seen


@pytest.mark.parametrize("count", [1, 17, 30, 45])
def test_resumed_bytes_equal_uninterrupted_bytes(tmp_path, source, count):
    on_progress, _ = stop_after(count)
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path / "out", INT4, on_progress)
    assert not (tmp_path / "out").exists()
    _, seen = stop_after(0)
    report = quantize_checkpoint(source, tmp_path / "out", INT4, seen.append)
    whole = quantize_checkpoint(source, tmp_path / "whole" / "out", INT4)
    assert same_but_paths(tmp_path / "out", tmp_path / "whole" / "out")
    assert report.modules == whole.modules
    finished = sum(1 for number in range(1, 4) if count > number * len(moe_tensors()) // 3)
    assert seen[0].shard == finished + 1  # finished shards are not made again
    assert seen[-1].bytes_done == seen[-1].bytes_total


def same_but_paths(one: Path, other: Path) -> bool:
    """Equal files; the report names its own output folder."""
    first, second = folder_bytes(one), folder_bytes(other)
    reports = [json.loads(files.pop("report.json")) for files in (first, second)]
    for report in reports:
        report.pop("output")
    return first == second and reports[0] == reports[1]


def test_a_damaged_finished_shard_is_made_again(tmp_path, source):
    on_progress, _ = stop_after(40)
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path / "out", INT4, on_progress)
    shard = tmp_path / ".out.partial" / "model-00001-of-00003.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    quantize_checkpoint(source, tmp_path / "out", INT4)
    quantize_checkpoint(source, tmp_path / "whole" / "out", INT4)
    assert same_but_paths(tmp_path / "out", tmp_path / "whole" / "out")


def test_other_settings_start_afresh(tmp_path, source):
    on_progress, _ = stop_after(40)
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path / "out", INT4, on_progress)
    seen = []
    quantize_checkpoint(source, tmp_path / "out", QuantizationConfig(format=NumberFormat.fp8), seen.append)
    assert seen[0].shard == 1 and CheckpointReader(tmp_path / "out").format is NumberFormat.fp8


KILL = """
import os, signal, sys
from orbit_cli.config.schema.base import QuantizationConfig
from orbit_cli.quantization.convert import quantize_checkpoint

seen = []
def die(progress):
    seen.append(progress)
    if len(seen) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

quantize_checkpoint(sys.argv[1], sys.argv[2], QuantizationConfig(), die)
"""


def test_kill_minus_nine_leaves_nothing_that_looks_whole(tmp_path, source):
    killed = subprocess.run(
        [sys.executable, "-c", KILL, str(source), str(tmp_path / "out"), "30"], env=os.environ, timeout=120
    )
    assert killed.returncode == -9
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == ["source"]
    partial = tmp_path / ".out.partial"
    assert not (partial / "config.json").exists() and not (partial / "model.safetensors.index.json").exists()
    with pytest.raises(CheckpointError):
        CheckpointReader(partial)
    report = quantize_checkpoint(source, tmp_path / "out", INT4)
    quantize_checkpoint(source, tmp_path / "whole" / "out", INT4)
    assert isinstance(report, QuantizationReport) and same_but_paths(tmp_path / "out", tmp_path / "whole" / "out")
