"""Small checkpoints for the tests of reading and converting: plain folders written here, without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTER, EXPERTS, LAYERS = 64, 32, 2, 3


def moe_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A tiny MoE language model's tensors, bfloat16, in Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.05).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(96, HIDDEN), "lm_head.weight": matrix(96, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{prefix}.self_attn.q_proj.bias"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
        tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS, generator=generator)
        for expert in range(EXPERTS):
            tensors[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = matrix(INTER, HIDDEN)
            tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = matrix(INTER, HIDDEN)
            tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = matrix(HIDDEN, INTER)
    return tensors


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, **config) -> Path:
    """Write a Hugging Face folder; with shards > 1 the tensors are dealt out in name order, with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "made_up", "architectures": ["MadeUp"], **config}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
