"""Tiny random checkpoints of every family, plain or INT4, and transformers' own model on the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.models.build import build_model
from orbit_cli.models.model import TrainerModel
from orbit_cli.quantization.formats import FORMATS
from orbit_cli.types import AdapterSpec

COMMON = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
)
ARCHITECTURES = {
    "llama": dict(COMMON, intermediate_size=96, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True),
    "qwen3": dict(COMMON, intermediate_size=96, num_key_value_heads=2, head_dim=32),
    "qwen3_moe": dict(
        COMMON,
        intermediate_size=96,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "deepseek_v3": dict(
        COMMON,
        num_hidden_layers=3,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        routed_scaling_factor=2.827,
        kv_lora_rank=32,
        q_lora_rank=64,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_theta=5e4,
        rope_scaling=dict(
            type="yarn",
            factor=64.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=8,
        ),
    ),
}
TARGETS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
MOE = ("qwen3_moe", "deepseek_v3")
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def random_model(model_type: str, seed: int = 0) -> nn.Module:
    """transformers' model, float32, with weights large enough that every part matters in the logits."""
    config = AutoConfig.for_model(model_type, **ARCHITECTURES[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            elif "inv_freq" not in name:
                tensor.copy_(0.15 * torch.randn(tensor.shape, generator=generator))
    model.requires_grad_(False)
    model.eval()
    return model


def checkpoint_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors under published names: experts one by one, BF16 but for the router's bias."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stored = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        fused = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)", name)
        if not fused:
            tensors[name] = stored.clone()
            continue
        for expert, weight in enumerate(stored):
            parts = [weight] if fused[2] == "down_proj" else weight.chunk(2)
            names = EXPERTS[2:] if fused[2] == "down_proj" else EXPERTS[:2]
            for projection, part in zip(names, parts, strict=True):
                tensors[f"{fused[1]}.{expert}.{projection}.weight"] = part.clone()
    return tensors


def write_checkpoint(folder: Path, model: nn.Module, number_format: NumberFormat = NumberFormat.bf16) -> nn.Module:
    """Save the model and return it with the weights that the checkpoint really stands for, in float32.

    Decoder linears (`*_proj`, kv_a included) are stored in `number_format`, everything else in BF16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": model.config.model_type, **ARCHITECTURES[model.config.model_type]}
    stored, meaning = {}, {}
    for name, tensor in checkpoint_tensors(model).items():
        module = name.removesuffix(".weight")
        if number_format is NumberFormat.bf16 or not re.search(r"_proj(_with_mqa)?$", module):
            stored[name] = meaning[name] = tensor
            continue
        # NVFP4: linears that are multiplied as one share a global scale; here all do.
        options = {"tensor_amax": 1.0} if number_format is NumberFormat.nvfp4 else {}
        quantized = FORMATS[number_format].quantize(tensor, name, **options)
        parts = FORMATS[number_format].to_checkpoint(quantized)
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        meaning[name] = quantized.dequantize()
    if number_format is not NumberFormat.bf16:
        scheme = FORMATS[number_format].SCHEME
        group = {"targets": ["Linear"], "weights": scheme["weights"], "format": scheme["format"]}
        section = {
            "quant_method": "compressed-tensors",
            "format": scheme["format"],
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
        }
        config["quantization_config"] = section | {"ignore": ["lm_head"]}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    load_dense(model, meaning)
    return model


@torch.no_grad()
def load_dense(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy tensors with published names into transformers' model."""
    own = dict(model.state_dict())
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if not expert:
            own[name].copy_(tensor)
        elif expert[3] == "down_proj":
            own[f"{expert[1]}.down_proj"][int(expert[2])].copy_(tensor)
        else:
            half = own[f"{expert[1]}.gate_up_proj"][int(expert[2])].chunk(2)[EXPERTS.index(expert[3])]
            half.copy_(tensor)


def spec_for(model_type: str, kind: str, *, experts: bool = True, block_size: int = 16, rank: int = 4) -> AdapterSpec:
    """Everything that can be adapted."""
    expert_targets = EXPERTS if experts and model_type in MOE else ()
    names = dict(targets=TARGETS[model_type], expert_targets=expert_targets)
    if kind == "shared":  # OFT with one rotation for all experts of a layer
        names |= dict(expert_targets=EXPERTS[:2], expert_width="shared")
    if kind in ("oft", "shared"):
        return AdapterSpec(kind="oft", **names, block_size=block_size, neumann_terms=6)
    return AdapterSpec(kind="lora", **names, rank=rank, scaling=1.5)


def build(folder: Path, spec: AdapterSpec, *, scale: float = 0.0, seed: int = 0, **options) -> TrainerModel:
    """build_model on the CPU in float32; scale > 0 gives the adapter random values."""
    options = {"layers": [], "device": "cpu", "dtype": torch.float32, "seed": seed} | options
    model = build_model(folder, spec, **options)
    if scale:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for master in model.bank.parameters():
                master.copy_(torch.randn(master.shape, generator=generator) * scale)
        model.bank.materialize()
    return model
