"""PEFT folders: PEFT loads ours and computes the same, we load PEFT's, and another function is refused."""

import dataclasses
import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import EXPERTS, build, random_model, spec_for, write_checkpoint
from transformers import AutoModelForCausalLM

from orbit_cli.adapters.peft_io import export_peft, load_peft, read_peft
from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.base_model import packed_parts
from orbit_cli.types import AdapterSpec

IDS = torch.randint(2, 96, (3, 11), generator=torch.Generator().manual_seed(5))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def unrounded(model) -> None:
    """Multiply by the float32 values that PEFT files hold, so that equality can be asked to float32."""
    with torch.no_grad():
        for part in model.bank.parts.values():
            exact = (part.master if part.build is None else part.build(part.master)).detach()
            for leaf, own in zip(part.leaves, exact.flatten().split([t.numel() for t in part.leaves]), strict=True):
                leaf.data = own.view(leaf.shape)


@torch.no_grad()
def logits(module) -> torch.Tensor:
    return module(input_ids=IDS).logits


@pytest.mark.parametrize("kind", ["oft", "lora"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3"])
def test_peft_loads_our_folder_and_computes_the_same(model_type, kind, tmp_path):
    reference = write_checkpoint(tmp_path / "base", random_model(model_type))
    spec = spec_for(model_type, kind, experts=False)
    if model_type == "deepseek_v3" and kind == "lora":  # PEFT moves these names onto the routed experts
        spec = dataclasses.replace(spec, targets=tuple(t for t in spec.targets if t not in EXPERTS))
    model = build(tmp_path / "base", spec, scale=0.05)
    shipped = logits(model.module)
    unrounded(model)
    found = logits(model.module)
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    base = logits(reference)
    wrapped = peft.PeftModel.from_pretrained(reference, folder)
    wanted = logits(wrapped)
    assert relative(wanted, base) > 0.02
    assert relative(found, wanted) <= 1e-5
    assert 0 < relative(shipped, wanted) < 0.1 * relative(wanted, base)  # rounding to BF16, and nothing else
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(t.dtype is torch.float32 for t in tensors.values())
    assert set(tensors) == {n.replace(".default.", ".") for n in peft_keys(wrapped)}


def peft_keys(wrapped) -> list[str]:
    return [n for n, _ in wrapped.named_parameters() if ".oft_R." in n or ".lora_" in n]


def test_peft_folds_our_lora_experts_into_its_own(tmp_path):
    reference = write_checkpoint(tmp_path / "base", random_model("qwen3_moe"))
    model = build(tmp_path / "base", spec_for("qwen3_moe", "lora"), scale=0.1)
    unrounded(model)
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    keys = load_file(folder / "adapter_model.safetensors")
    assert keys["base_model.model.model.layers.1.mlp.experts.5.gate_proj.lora_A.weight"].shape == (4, 64)
    base = logits(reference)
    wanted = logits(peft.PeftModel.from_pretrained(reference, folder))
    assert relative(wanted, base) > 0.02
    assert relative(logits(model.module), wanted) <= 1e-5


@pytest.mark.parametrize("number_format", list(NumberFormat))
@pytest.mark.parametrize("kind", ["oft", "lora"])
def test_the_readme_loads_what_it_stands_beside(kind, number_format, tmp_path, monkeypatch):
    """Its lines as they are, run in its folder: the function of the base with the adapter, and text comes out."""
    reference = write_checkpoint(tmp_path / "base", random_model("llama"), number_format)
    model = build(tmp_path / "base", spec_for("llama", kind, experts=False), scale=0.05)
    packed = packed_parts(tmp_path / "base")
    assert packed == (set() if number_format is NumberFormat.bf16 else {"linears"})
    folder = export_peft(
        model.bank, tmp_path / "adapter", base_model=str(tmp_path / "base"), packed=packed, origin="Made of smoke."
    )
    text = (folder / "README.md").read_text()
    assert text.startswith(f"# {'OFT' if kind == 'oft' else 'LoRA'} adapter") and "\nMade of smoke.\n" in text
    names = {}
    monkeypatch.chdir(folder)
    exec(text.split("```python\n")[1].split("```")[0], names)
    loaded = names["model"].float().eval()
    base = logits(reference)
    wanted = logits(peft.PeftModel.from_pretrained(reference, folder))
    assert relative(wanted, base) > 0.02
    assert relative(logits(loaded), wanted) < 0.1 * relative(wanted, base)  # its dtype may be bfloat16
    assert loaded.generate(input_ids=IDS[:1], max_new_tokens=3).shape == (1, IDS.shape[1] + 3)


def test_the_readme_beside_packed_experts_loads_nothing(tmp_path):
    """Its reason holds: transformers finds no experts in such a base."""
    write_checkpoint(tmp_path / "base", random_model("qwen3_moe"), NumberFormat.int4)
    packed = packed_parts(tmp_path / "base")
    assert packed == {"experts", "linears"}
    bank = build(tmp_path / "base", spec_for("qwen3_moe", "lora")).bank
    text = (export_peft(bank, tmp_path / "a", base_model="base", packed=packed) / "README.md").read_text()
    assert "```" not in text and "does not unpack them" in text and "orbit rollout run.adapter=" in text
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert "model.layers.0.mlp.experts.gate_up_proj" in info["missing_keys"]


@pytest.mark.parametrize("kind", ["oft", "lora"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_round_trip_is_bit_exact(model_type, kind, tmp_path):
    write_checkpoint(tmp_path / "base", random_model(model_type))
    model = build(tmp_path / "base", spec_for(model_type, kind), scale=0.05, layers=[1])
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    read = read_peft(folder)
    assert set(read.spec.targets) == set(model.bank.spec.targets)
    assert read.spec.expert_targets == model.bank.spec.expert_targets
    assert read.layers == [1]
    fresh = build(tmp_path / "base", read.spec, layers=read.layers, seed=9)
    assert fresh.bank.version(0).checksum != model.bank.version(0).checksum
    load_peft(fresh.bank, folder)
    ours, theirs = model.bank.named_state(), fresh.bank.named_state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert fresh.bank.version(0).checksum == model.bank.version(0).checksum
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()


@pytest.mark.parametrize("kind", ["oft", "lora", "rslora"])
def test_an_adapter_that_peft_made(kind, tmp_path):
    reference = write_checkpoint(tmp_path / "base", random_model("llama"))
    names = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    if kind == "oft":
        config = peft.OFTConfig(**names, oft_block_size=16, num_cayley_neumann_terms=6)
    else:
        config = peft.LoraConfig(**names, r=4, lora_alpha=6, use_rslora=kind == "rslora")
    wrapped = peft.get_peft_model(reference, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".oft_R." in name or ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    wanted = logits(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    read = read_peft(tmp_path / "adapter")
    assert read.spec.targets == ("down_proj", "q_proj")
    assert kind == "oft" or read.spec.scaling == pytest.approx(6 / 4 if kind == "lora" else 6 / 2)
    model = build(tmp_path / "base", read.spec)
    load_peft(model.bank, tmp_path / "adapter")
    unrounded(model)
    assert relative(logits(model.module), wanted) <= 1e-5
    again = json.loads((export_peft(model.bank, tmp_path / "out", base_model="x") / "adapter_config.json").read_text())
    assert kind == "oft" or (again["use_rslora"] is False and again["lora_alpha"] / again["r"] == read.spec.scaling)


def test_lora_experts_from_peft_target_parameters(tmp_path):
    """A expert by expert, B with the expert running fastest (peft's get_delta_weight decides what is right)."""
    reference = write_checkpoint(tmp_path / "base", random_model("qwen3_moe"))
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=parameters, r=2, lora_alpha=3)
    wrapped = peft.get_peft_model(reference, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    wanted = logits(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    read = read_peft(tmp_path / "adapter")
    assert set(read.spec.expert_targets) == {"gate_proj", "up_proj", "down_proj"}
    model = build(tmp_path / "base", read.spec)
    load_peft(model.bank, tmp_path / "adapter")
    unrounded(model)
    assert relative(logits(model.module), wanted) <= 1e-5
    # The wrong reading of B is far off, so this test can fail.
    name = "model.layers.1.mlp.experts.3.down_proj.lora_B"
    fused = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wrong = fused["base_model.model.model.layers.1.mlp.experts.lora_B.weight"][:, 6:8]
    assert not torch.allclose(model.bank.named_state()[name], wrong)


def edit_config(folder, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED = [
    ("oft", {"use_cayley_neumann": False}, "rotates the other way"),
    ("oft", {"coft": True}, "coft=True"),
    ("oft", {"block_share": True}, "block_share=True"),
    ("oft", {"peft_version": "0.17.1"}, "written by PEFT 0.17.1"),
    ("oft", {"num_cayley_neumann_terms": 5}, r"neumann_terms=5 but this run has 6.*set adapter\.neumann_terms=5"),
    ("lora", {"use_dora": True}, "use_dora=True"),
    ("lora", {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ("lora", {"lora_alpha": 8.0}, r"scaling=2\.0 but this run has 1\.5.*set adapter\.alpha=8\.0"),
    ("lora", {"use_rslora": True}, r"scaling=3\.0 but this run has 1\.5"),
    ("lora", {"peft_type": "IA3"}, "IA3 adapter; supported are OFT, LORA"),
]


@pytest.mark.parametrize(("kind", "changes", "complaint"), REFUSED)
def test_another_function_is_refused(kind, changes, complaint, tmp_path):
    write_checkpoint(tmp_path / "base", random_model("llama"))
    model = build(tmp_path / "base", spec_for("llama", kind), scale=0.05)
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    load_peft(model.bank, folder)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        load_peft(model.bank, folder)


def test_the_block_size_is_read_from_the_tensors(tmp_path):
    """PEFT saves the requested block size even where it used another."""
    write_checkpoint(tmp_path / "base", random_model("llama"))
    model = build(tmp_path / "base", spec_for("llama", "oft"), scale=0.05)
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    edit_config(folder, oft_block_size=32)
    assert read_peft(folder).spec.block_size == 16


@pytest.mark.parametrize(
    ("kind", "config", "complaint"),
    [
        ("oft", "[]", r"holds \[\] and no mapping"),
        ("lora", {"lora_alpha": ...}, "has no lora_alpha, and it must be a number"),
        ("lora", {"r": ...}, "has no r, and it must be a whole number"),
        ("lora", {"r": 0}, "r=0, and it must be a whole number of at least 1"),
        ("oft", {"oft_block_size": "x"}, 'oft_block_size="x", and it must be a whole number'),
        ("oft", {"target_modules": 7}, "target_modules=7, and it must be a name or a list of names"),
        ("oft", {"base_model_name_or_path": 7}, "base_model_name_or_path=7, and it must be text"),
    ],
)
def test_a_damaged_config_is_one_sentence(kind, config, complaint, tmp_path):
    write_checkpoint(tmp_path / "base", random_model("llama"))
    folder = export_peft(build(tmp_path / "base", spec_for("llama", kind)).bank, tmp_path / "a", base_model="base")
    path = folder / "adapter_config.json"
    if isinstance(config, dict):
        merged = json.loads(path.read_text()) | config
        config = json.dumps({key: value for key, value in merged.items() if value is not ...})
    path.write_text(config)
    with pytest.raises(CheckpointError, match=complaint):
        read_peft(folder)


def test_tensors_that_no_adapter_here_has(tmp_path):
    write_checkpoint(tmp_path / "base", random_model("llama"))
    folder = export_peft(build(tmp_path / "base", spec_for("llama", "oft")).bank, tmp_path / "a", base_model="base")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    for changed, complaint in (
        ({}, "has no tensors"),
        ({name: tensors[name].flatten()}, "of shape"),
        ({name.replace("oft_R", "lora_A"): tensors[name]}, "end with oft_R.weight"),
    ):
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=complaint):
            read_peft(folder)


def test_missing_and_foreign_files(tmp_path):
    write_checkpoint(tmp_path / "base", random_model("llama"))
    spec = AdapterSpec(kind="lora", targets=("q_proj",), rank=2, scaling=1.0)
    model = build(tmp_path / "base", spec)
    with pytest.raises(CheckpointError, match="is no PEFT adapter"):
        load_peft(model.bank, tmp_path / "nowhere")
    folder = export_peft(model.bank, tmp_path / "adapter", base_model="base")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"] = torch.zeros(64)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lora_magnitude_vector"):
        load_peft(model.bank, folder)
