"""The built model computes what transformers computes on the dequantised weights, and refuses anything else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import ARCHITECTURES, build, checkpoint_tensors, random_model, spec_for, write_checkpoint

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError, ConfigError
from orbit_cli.models.families import FAMILIES
from orbit_cli.models.frozen import FrozenExperts, FrozenLinear
from orbit_cli.types import AdapterSpec

FORMATS = [NumberFormat.bf16, NumberFormat.int4, NumberFormat.mxfp4, NumberFormat.nvfp4, NumberFormat.fp8]
IDS = torch.randint(2, 96, (3, 11), generator=torch.Generator().manual_seed(5))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["oft", "lora"])
@pytest.mark.parametrize("number_format", FORMATS, ids=str)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_equal_transformers_on_dequantised_weights(model_type, number_format, kind, tmp_path):
    """With a fresh adapter too: zero-initialised adapters are bitwise the base."""
    reference = write_checkpoint(tmp_path, random_model(model_type), number_format)
    model = build(tmp_path, spec_for(model_type, kind))
    with torch.no_grad():
        wanted, found = reference(IDS).logits, model.module(IDS).logits
        with model.disabled():
            base = model.module(IDS).logits
    assert wanted.std() > 0.1
    assert relative(found, wanted) <= 1e-5
    assert torch.equal(found, base)


def test_bfloat16_activations(tmp_path):
    reference = write_checkpoint(tmp_path, random_model("qwen3"), NumberFormat.int4)
    model = build(tmp_path, spec_for("qwen3", "oft"), scale=0.02, dtype=torch.bfloat16)
    with torch.no_grad(), model.disabled():
        found = model.module(IDS).logits
    assert found.dtype is torch.bfloat16
    assert relative(found.float(), reference(IDS).logits) < 0.03


def test_disabled_is_bitwise_the_base_whatever_the_adapter(tmp_path):
    write_checkpoint(tmp_path, random_model("qwen3_moe"), NumberFormat.int4)
    fresh = build(tmp_path, spec_for("qwen3_moe", "oft"))
    trained = build(tmp_path, spec_for("qwen3_moe", "oft"), scale=0.1)
    with torch.no_grad():
        base, adapted = fresh.module(IDS).logits, trained.module(IDS).logits
        with trained.disabled():
            off = trained.module(IDS).logits
        again = trained.module(IDS).logits
    assert torch.equal(off, base)
    assert relative(adapted, base) > 1e-2
    assert torch.equal(adapted, again)


def test_kimi_names_and_nested_config(tmp_path):
    """Kimi-K2.x: `language_model.` before every name, text_config, a vision tower that the text policy skips."""
    reference = write_checkpoint(tmp_path, random_model("deepseek_v3"), NumberFormat.int4)
    stored = {f"language_model.{name}": t for name, t in load_file(tmp_path / "model.safetensors").items()}
    stored["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 2)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    text["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    model = build(tmp_path, spec_for("deepseek_v3", "lora"), scale=0.1)
    assert "language_model.model.layers.1.self_attn.o_proj.lora_A" in model.bank.version(0).tensors
    assert "language_model.model.layers.1.mlp.experts.7.up_proj.lora_B" in model.bank.version(0).tensors
    with torch.no_grad(), model.disabled():
        assert relative(model.module(IDS).logits, reference(IDS).logits) <= 1e-5


def test_the_base_is_held_packed_and_nothing_is_trainable(tmp_path):
    write_checkpoint(tmp_path, random_model("deepseek_v3"), NumberFormat.int4)
    model = build(tmp_path, spec_for("deepseek_v3", "oft"))
    packed = [m for m in model.module.modules() if isinstance(m, FrozenLinear) and m.fmt == "int4"]
    experts = [m for m in model.module.modules() if isinstance(m, FrozenExperts)]
    assert len(packed) == 24 and len(experts) == 2
    assert all(m.weight.dtype is torch.uint8 for m in packed)
    assert all(m.w13.shape == (8, 64, 32) and m.w13.dtype is torch.uint8 for m in experts)
    assert all(m.w2.shape == (8, 64, 16) for m in experts)
    assert not any(p.requires_grad for p in model.module.parameters())
    bias = dict(model.module.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype is torch.float32
    weights = sum(m.in_features * m.out_features for m in packed) + sum(8 * 3 * 64 * 32 for _ in experts)
    memory = model.memory()
    assert memory["base_packed"] == weights // 2 + weights // 32 * 2
    trained = sum(p.numel() for p in model.bank.parameters())
    matrices = sum(part.compute.numel() for part in model.bank.parts.values())
    assert memory["adapter"] == 4 * trained + 2 * matrices > 0
    assert memory["adapter_grads"] == 4 * (trained + matrices)


def test_router_bias_stays_float32_under_bfloat16_activations(tmp_path):
    write_checkpoint(tmp_path, random_model("deepseek_v3"))
    model = build(tmp_path, spec_for("deepseek_v3", "oft"), dtype=torch.bfloat16)
    buffers = dict(model.module.named_buffers())
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(buffers["model.layers.1.mlp.gate.e_score_correction_bias"], stored)
    assert model.module.model.layers[1].mlp.gate.weight.dtype is torch.bfloat16
    assert buffers["model.rotary_emb.inv_freq"].dtype is torch.float32


def test_receipt_lists_every_adapted_tensor(tmp_path):
    write_checkpoint(tmp_path, random_model("qwen3_moe"))
    model = build(tmp_path, spec_for("qwen3_moe", "oft"))
    names = [site.name for site in model.adapted]
    assert len(names) == 2 * 4 + 2 * 3
    assert "model.layers.1.mlp.experts.*.down_proj" in names
    site = next(s for s in model.adapted if s.name == "model.layers.1.mlp.experts.*.gate_proj")
    assert (site.experts, site.shapes, site.parameters) == (6, {"oft_R": (4, 16, 16)}, 6 * 4 * 120)
    assert not any("mlp.gate" in name.replace("gate_proj", "") for name in names)


def test_layers_restrict_the_adapter(tmp_path):
    write_checkpoint(tmp_path, random_model("llama"))
    model = build(tmp_path, spec_for("llama", "lora"), layers=[1])
    assert {site.module.split(".")[2] for site in model.adapted} == {"1"}
    assert model.module.model.layers[0].self_attn.q_proj.adapter is None
    with pytest.raises(ConfigError, match=r"layer 2, but the model has layers 0 to 1"):
        build(tmp_path, spec_for("llama", "lora"), layers=[1, 2])


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (AdapterSpec(kind="lora", targets=("qproj",), rank=2), r"'qproj', which matches no linear .* nearest: q_proj"),
        (AdapterSpec(kind="lora", targets=("gate",), rank=2), r"'gate', which matches no linear"),
        (
            AdapterSpec(kind="lora", targets=("q_proj",), expert_targets=("up",), rank=2),
            r"'up'; experts have",
        ),
        (
            AdapterSpec(kind="oft", targets=("q_proj",), block_size=24, neumann_terms=6),
            r"not divide the 64 inputs",
        ),
    ],
)
def test_targets_that_match_nothing_are_refused(spec, complaint, tmp_path):
    write_checkpoint(tmp_path, random_model("qwen3_moe"))
    with pytest.raises(ConfigError, match=complaint):
        build(tmp_path, spec)


def test_expert_targets_without_experts_are_refused(tmp_path):
    write_checkpoint(tmp_path, random_model("llama"))
    spec = AdapterSpec(kind="lora", targets=("q_proj",), expert_targets=("up_proj",), rank=2)
    with pytest.raises(ConfigError, match=r"expert_targets=\[\]"):
        build(tmp_path, spec)


def edit(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGE = {
    "lacks model.layers.1.self_attn.k_proj": lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
    "lacks model.norm.weight": lambda t: t.pop("model.norm.weight"),
    "lacks model.layers.0.mlp.experts": lambda t: t.pop("model.layers.0.mlp.experts.3.up_proj.weight"),
    "tensor model.layers.0.self_attn.sinks": lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}),
    "tensor model.layers.0.self_attn.q_proj.bias": lambda t: t.update(
        {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}
    ),
    r"q_proj has shape \[64, 64\]": lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}),
    "experts.6.up_proj": lambda t: t.update({"model.layers.0.mlp.experts.6.up_proj.weight": torch.zeros(32, 64)}),
}


@pytest.mark.parametrize("complaint", DAMAGE)
def test_every_tensor_is_used_and_every_module_filled(complaint, tmp_path):
    write_checkpoint(tmp_path, random_model("qwen3_moe"))
    edit(tmp_path, DAMAGE[complaint])
    with pytest.raises(CheckpointError, match=complaint):
        build(tmp_path, spec_for("qwen3_moe", "lora"))


def test_other_architectures_are_refused_with_the_list(tmp_path):
    write_checkpoint(tmp_path, random_model("llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match=f"'gpt2'.*{', '.join(FAMILIES)}"):
        build(tmp_path, spec_for("llama", "oft"))


def test_biases_are_loaded_and_required(tmp_path):
    """attention_bias=true: llama then has biases on q, k, v and o."""
    model = random_model("llama")
    tensors = checkpoint_tensors(model)
    names = [n for n in tensors if "self_attn" in n and n.endswith("_proj.weight")]
    biases = {n.replace("weight", "bias"): torch.randn(tensors[n].shape[0]).bfloat16() for n in names}
    write_checkpoint(tmp_path, model, NumberFormat.int4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.\w_proj"):
        build(tmp_path, spec_for("llama", "oft"))
    edit(tmp_path, lambda t: t.update(biases))
    built = build(tmp_path, spec_for("llama", "oft"))
    layer = built.module.model.layers[0].self_attn.k_proj
    x = torch.randn(2, 64)
    wanted = model.model.layers[0].self_attn.k_proj(x) + biases["model.layers.0.self_attn.k_proj.bias"].float()
    assert torch.allclose(layer(x), wanted, atol=1e-5)


def test_nvfp4_experts_must_share_the_global_scale_of_gate_and_up(tmp_path):
    write_checkpoint(tmp_path, random_model("qwen3_moe"), NumberFormat.nvfp4)
    name = "model.layers.0.mlp.experts.2.up_proj.weight_global_scale"
    edit(tmp_path, lambda t: t.update({name: t[name] * 2}))
    with pytest.raises(CheckpointError, match="expert 2 have different NVFP4 global scales"):
        build(tmp_path, spec_for("qwen3_moe", "lora"))


def test_checksum_sees_one_flipped_bit(tmp_path):
    write_checkpoint(tmp_path, random_model("llama"), NumberFormat.int4)
    model = build(tmp_path, spec_for("llama", "oft"))
    before = model.checksum()
    assert before == build(tmp_path, spec_for("llama", "lora"), seed=3).checksum()
    model.module.model.layers[1].mlp.up_proj.weight[3, 4] ^= 1
    assert model.checksum() != before
