"""One rotation for all routed experts of a layer: off it is the base, its receipt, and its PEFT folder.

What it computes, and its gradients, are compared with float64 in test_trainer_model.py (kind "shared").
"""

import dataclasses
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import EXPERTS, MOE, build, random_model, spec_for, write_checkpoint

from orbit_cli.adapters.peft_io import export_peft, load_peft, read_peft
from orbit_cli.adapters.peft_version import load_peft_version
from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError

IDS = torch.randint(2, 96, (3, 11), generator=torch.Generator().manual_seed(5))
ROTATION = "model.layers.1.mlp.experts.gate_up_proj"


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.module(input_ids=IDS).logits


@pytest.mark.parametrize("model_type", MOE)
def test_off_it_is_bitwise_the_base_and_on_it_is_not(model_type, tmp_path):
    write_checkpoint(tmp_path, random_model(model_type), NumberFormat.int4)
    plain = build(tmp_path, spec_for(model_type, "oft", experts=False), scale=0.05)
    model = build(tmp_path, dataclasses.replace(spec_for(model_type, "shared"), targets=("o_proj",)), scale=0.05)
    with plain.disabled(), model.disabled():
        assert torch.equal(logits(model), logits(plain))
        base = logits(plain)
    with torch.no_grad():
        for site, leaf in zip(model.adapted, model.bank.parts["oft_R"].leaves, strict=True):
            if site.projection == "o_proj":
                leaf.copy_(torch.eye(16).expand_as(leaf))
    assert (logits(model) - base).norm() > 0.01 * base.norm()  # the experts' rotation alone


def test_the_receipt_has_one_tensor_per_layer(tmp_path):
    write_checkpoint(tmp_path, random_model("deepseek_v3"))
    model = build(tmp_path, spec_for("deepseek_v3", "shared"), scale=0.05)
    sites = [site for site in model.adapted if site.of_experts]
    assert [site.name for site in sites] == [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (1, 2)]
    for site in sites:
        assert (site.experts, site.in_features, site.out_features) == (0, 64, 64)
        assert site.paths == [site.name] and site.shapes == {"oft_R": (4, 16, 16)} and site.parameters == 4 * 120
    version = model.bank.version(0)
    assert {name for name in version.tensors if ".experts." in name} == {f"{site.name}.oft_R" for site in sites}
    assert version.tensors[f"{ROTATION}.oft_R"].shape == (4, 16, 16)


def exported(tmp_path, model_type="deepseek_v3"):
    write_checkpoint(tmp_path / "base", random_model(model_type))
    model = build(tmp_path / "base", spec_for(model_type, "shared"), scale=0.05)
    return model, export_peft(model.bank, tmp_path / "adapter", base_model="base")


@pytest.mark.parametrize("model_type", MOE)
def test_the_folder_gives_back_the_same_bits(model_type, tmp_path):
    model, folder = exported(tmp_path, model_type)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["expert_width"] == "shared"
    assert load_file(folder / "adapter_model.safetensors")[f"base_model.model.{ROTATION}.oft_R.weight"].shape == (
        4,
        120,
    )
    read = read_peft(folder)
    assert (read.spec.expert_targets, read.spec.expert_width) == (("gate_proj", "up_proj"), "shared")
    assert set(read.spec.targets) == set(model.bank.spec.targets)
    fresh = build(tmp_path / "base", read.spec, seed=9)
    load_peft(fresh.bank, folder)
    ours, theirs = model.bank.named_state(), fresh.bank.named_state()
    assert ours.keys() == theirs.keys() and all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert load_peft_version(folder, 3).checksum == model.bank.version(3).checksum


def test_a_checkpoints_state_is_taken_back_bit_for_bit_and_another_width_refused(tmp_path):
    model, _ = exported(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.bank.named_state().items()}
    fresh = build(tmp_path / "base", model.bank.spec, seed=9)
    fresh.bank.load_state(state)
    assert fresh.bank.version(0).checksum == model.bank.version(0).checksum
    each = build(tmp_path / "base", dataclasses.replace(model.bank.spec, expert_width="per_expert"))
    with pytest.raises(CheckpointError, match="set adapter.targets, expert_targets, expert_width and layers"):
        each.bank.load_state(state)


def test_another_width_is_refused_by_name(tmp_path):
    model, folder = exported(tmp_path)
    each = dataclasses.replace(model.bank.spec, expert_width="per_expert")
    with pytest.raises(
        CheckpointError, match=r"expert_width=shared but this run has per_expert.*adapter\.expert_width"
    ):
        load_peft(build(tmp_path / "base", each).bank, folder)
    other = export_peft(build(tmp_path / "base", each).bank, tmp_path / "each", base_model="base")
    with pytest.raises(CheckpointError, match=r"expert_width=per_expert but this run has shared"):
        load_peft(model.bank, other)


def test_folders_without_the_field_are_per_expert(tmp_path):
    """As PEFT's own, those that were written before there was one, and those of such adapters, which PEFT can load."""
    write_checkpoint(tmp_path / "base", random_model("qwen3_moe"))
    model = build(tmp_path / "base", spec_for("qwen3_moe", "oft"), scale=0.05)
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    assert "expert_width" not in json.loads((folder / "adapter_config.json").read_text())
    read = read_peft(folder)
    assert (read.spec.expert_targets, read.spec.expert_width) == (EXPERTS, "per_expert")
    load_peft(model.bank, folder)


@pytest.mark.parametrize(
    ("width", "complaint"), [("per_expert", "has expert_width=per_expert"), ("one", "must be per_")]
)
def test_a_config_that_its_tensors_belie_is_refused(width, complaint, tmp_path):
    _, folder = exported(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"expert_width": width}))
    with pytest.raises(CheckpointError, match=complaint):
        read_peft(folder)


def test_a_folder_of_both_widths_is_refused(tmp_path):
    _, folder = exported(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"base_model.model.{ROTATION}.oft_R.weight"
    tensors[name.replace("experts.gate_up_proj", "experts.3.down_proj")] = tensors[name].clone()
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="adapters on down_proj, gate_up_proj of routed experts"):
        read_peft(folder)


def test_plain_peft_leaves_the_rotation_out_and_says_so(tmp_path):
    """What the folder's README tells."""
    write_checkpoint(tmp_path / "base", reference := random_model("qwen3_moe"))
    model = build(tmp_path / "base", spec_for("qwen3_moe", "shared"), scale=0.05)
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    assert "Plain PEFT cannot load it" in (folder / "README.md").read_text()
    with pytest.warns(UserWarning, match="expert_width|unexpected"):
        wrapped = peft.PeftModel.from_pretrained(reference, folder)
    wanted = logits(model)
    with torch.no_grad():
        assert (wrapped(IDS).logits - wanted).norm() > 0.01 * wanted.norm()
