#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a mixture of experts: a real model for work on experts, a gigabyte in size.

    python scripts/upcycle_smollm2.py /models/smollm2-moe [--experts 8] [--top-k 2] [--noise 0.02] [--seed 0]
    orbit train model=checkpoint model.path=/models/smollm2-moe 'quantization.targets=[experts]'

Writes a qwen3_moe checkpoint that computes the dense model but for the noise. Every expert is the dense MLP with
relative noise on each weight; the router is random, and its weights sum to 1. Qwen3 normalises queries and keys, which
llama does not: each head gets as many further dimensions as it has, filled by the bias with one large constant, so that
the norm divides by a constant and its weight undoes it (relative error 1e-4). The further dimensions have norm weight
0 and meet no others. A head of twice the size turns pair i of the rotary embedding by what pair 2i turned before.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from orbit_cli.quantization.gguf import GgufReader, shipped_smollm2

CONSTANT = 1448.0  # of the further dimensions; over sqrt(2) it is what the norm divides by
LAYERS_PER_FILE = 5


class Upcycler:
    """Tensors of the new checkpoint from those of the old one."""

    def __init__(self, reader: GgufReader, experts: int, noise: float, seed: int) -> None:
        self.reader, self.experts, self.noise = reader, experts, noise
        self.generator = torch.Generator().manual_seed(seed)
        config = reader.config
        self.heads, self.key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.hidden = config["hidden_size"]
        self.size = self.hidden // self.heads  # of a head, before

    def layer(self, number: int) -> dict[str, Tensor]:
        """All tensors of one decoder layer."""
        path = f"model.layers.{number}."
        tensors = {
            path + n: self.reader.tensor(path + n) for n in _norms("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {path + "self_attn." + name: tensor for name, tensor in self._attention(path).items()}
        tensors[path + "mlp.gate.weight"] = self._normal(self.experts, self.hidden) / math.sqrt(self.hidden)
        for projection in ("gate_proj", "up_proj", "down_proj"):
            dense = self.reader.tensor(f"{path}mlp.{projection}.weight").float()
            for expert in range(self.experts):
                own = dense * (1 + self.noise * self._normal(*dense.shape))
                tensors[f"{path}mlp.experts.{expert}.{projection}.weight"] = own
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}

    def outside(self) -> dict[str, Tensor]:
        """Embeddings, last norm and an lm_head of its own."""
        embeddings = self.reader.tensor("model.embed_tokens.weight")
        norm = {name: self.reader.tensor("model." + name) for name in _norms("norm")}
        return {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.clone()} | {
            "model." + name: tensor for name, tensor in norm.items()
        }

    def _attention(self, path: str) -> dict[str, Tensor]:
        weight = {n: self.reader.tensor(f"{path}self_attn.{n}.weight").float() for n in ("q_proj", "k_proj", "v_proj")}
        output = self.reader.tensor(f"{path}self_attn.o_proj.weight").float()
        wide = torch.zeros(self.hidden, self.heads, 2 * self.size)
        wide[:, :, self._places()] = output.view(self.hidden, self.heads, self.size)
        constant = torch.full((2 * self.size,), CONSTANT)
        constant[self._places()] = 0.0
        own = torch.zeros(2 * self.size)
        own[self._places()] = CONSTANT / math.sqrt(2)
        return {
            "q_proj.weight": self._wider(weight["q_proj"], self.heads),
            "k_proj.weight": self._wider(weight["k_proj"], self.key_heads),
            "v_proj.weight": self._wider(weight["v_proj"], self.key_heads),
            "o_proj.weight": wide.view(self.hidden, -1),
            "q_proj.bias": constant.repeat(self.heads),
            "k_proj.bias": constant.repeat(self.key_heads),
            "v_proj.bias": torch.zeros(self.key_heads * 2 * self.size),
            "o_proj.bias": torch.zeros(self.hidden),
            # Scores are divided by the root of the head's size, which is twice what it was.
            "q_norm.weight": own * math.sqrt(2),
            "k_norm.weight": own,
        }

    def _places(self) -> Tensor:
        """Where the old dimensions of a head go: i to 2i, as its rotary partner i + size/2 to 2i + size."""
        return 2 * torch.arange(self.size)

    def _wider(self, weight: Tensor, heads: int) -> Tensor:
        """[heads * size, hidden] -> [heads * 2 * size, hidden] with zero rows for the further dimensions."""
        rows = torch.zeros(heads, 2 * self.size, self.hidden)
        rows[:, self._places()] = weight.view(heads, self.size, self.hidden)
        return rows.view(-1, self.hidden)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def write(folder: Path, experts: int, top_k: int, noise: float, seed: int) -> None:
    """Make the checkpoint folder; config.json is written last, so that a killed run leaves none that loads."""
    reader = GgufReader(shipped_smollm2())
    folder.mkdir(parents=True, exist_ok=True)
    reader.write_side_files(folder)
    (folder / "config.json").unlink(missing_ok=True)
    upcycler, index = Upcycler(reader, experts, noise, seed), {}
    layers = reader.config["num_hidden_layers"]
    for first in range(0, layers, LAYERS_PER_FILE):
        tensors = {} if first else upcycler.outside()
        for number in range(first, min(first + LAYERS_PER_FILE, layers)):
            tensors |= upcycler.layer(number)
        name = f"model-{first // LAYERS_PER_FILE + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        print(f"{name}: layers {first} to {number}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = _config(reader.config, experts, top_k)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    print(f"{folder}: {experts} experts, top {top_k}")


def _config(dense: dict, experts: int, top_k: int) -> dict:
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "rope_theta", "bos_token_id", "eos_token_id", "hidden_act",
            "intermediate_size")  # fmt: skip
    return {name: dense[name] for name in kept if name in dense} | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "attention_bias": True,
        "head_dim": 2 * dense["hidden_size"] // dense["num_attention_heads"],
        "moe_intermediate_size": dense["intermediate_size"],
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }


def _norms(*names: str) -> list[str]:
    return [f"{name}.weight" for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not 1 <= given.top_k <= given.experts:
        parser.error(f"--top-k {given.top_k} must be between 1 and --experts {given.experts}")
    write(given.folder, given.experts, given.top_k, given.noise, given.seed)


if __name__ == "__main__":
    main()
