"""Tiny checkpoints for the engine tests, random adapters for them, and what transformers says about both.

The reference never sees a packed weight or an adapter module: it multiplies dequantised weights that were changed in
place (W R^T for OFT, W + s B A for LoRA), so it shares no code with what it judges.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from orbit_cli.adapters.bundle import make_version
from orbit_cli.types import AdapterSpec, AdapterVersion, Completion

GROUP = 32
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_COMMON = {"vocab_size": 256, "max_position_embeddings": 512, "eos_token_id": 0, "bos_token_id": 1}

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
         "mscale_all_dim": 1.0, "original_max_position_embeddings": 128}  # fmt: skip

CONFIGS = {
    "qwen3": lambda: Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=False, **_COMMON,
    ),
    "llama": lambda: LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, **_COMMON,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, decoder_sparse_step=1,
        norm_topk_prob=True, tie_word_embeddings=False, **_COMMON,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, rms_norm_eps=1e-5, tie_word_embeddings=False, **_COMMON,
        rope_parameters=_YARN,
    ),
}  # fmt: skip


def write_checkpoint(folder: Path, model_type: str, *, quantised: tuple[str, ...] = (), seed: int = 0):
    """Write a random checkpoint with one tensor per expert; linears below a component of `quantised` become INT4.

    Returns the float32 transformers model that computes with exactly the weights in the file.
    """
    torch.manual_seed(seed)
    config = CONFIGS[model_type]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the default, so that tokens and routing differ clearly
            parameter.copy_((parameter * 4 if parameter.dim() > 1 else parameter).bfloat16())
    stored: dict[str, torch.Tensor] = {}
    ignored = ["lm_head"]
    for name, view in linear_views(model).items():
        if set(name.split(".")) & set(quantised):
            packed, values = _int4(view)
            view.copy_(values)
            stored |= {f"{name}.{key}": tensor for key, tensor in packed.items()}
        else:
            stored[f"{name}.weight"] = view.bfloat16().contiguous()
            ignored.append(name)
    for name, tensor in model.state_dict().items():
        is_head = name == "lm_head.weight" and config.tie_word_embeddings
        if name.removesuffix(".weight") not in linear_views(model) and ".experts." not in name and not is_head:
            keep = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            stored[name] = tensor.to(keep).contiguous()
    folder.mkdir(parents=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config_json(config, model, quantised, ignored), indent=1))
    return model


def linear_views(model) -> dict[str, torch.Tensor]:
    """Weights of all decoder linears by checkpoint path, experts one by one, as writable views [out, in]."""
    views: dict[str, torch.Tensor] = {}
    for path, module in model.model.named_modules(prefix="model"):
        if isinstance(module, torch.nn.Linear):
            views[path] = module.weight.data
        elif path.endswith(".experts") and hasattr(module, "gate_up_proj"):
            for expert in range(module.gate_up_proj.shape[0]):
                gate, up = module.gate_up_proj.data[expert].chunk(2)
                views[f"{path}.{expert}.gate_proj"], views[f"{path}.{expert}.up_proj"] = gate, up
                views[f"{path}.{expert}.down_proj"] = module.down_proj.data[expert]
    return views


def _int4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = weight.shape
    groups = weight.view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1) / 7.5).clamp(min=1e-8).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    packed = {
        "weight_packed": pack_to_int32(codes.view(rows, columns).to(torch.int8), 4).contiguous(),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    return packed, (codes * scale.float().unsqueeze(-1)).view(rows, columns)


def _config_json(config, model, quantised, ignored) -> dict:
    content = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    if "kv_lora_rank" in content:  # SGLang reads DeepSeek's own names
        rope = content.pop("rope_parameters")
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
        content |= {"rope_theta": rope["rope_theta"], "rope_scaling": {**scaling, "type": rope["rope_type"]}}
        content |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    if quantised:
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                   "dynamic": False}  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        content["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }
    return content


def random_version(number: int, spec: AdapterSpec, model, *, kind: str, seed: int | None = None) -> AdapterVersion:
    """A random adapter on every target of `spec`; rotations come from a matrix exponential, so they are orthogonal."""
    generator = torch.Generator().manual_seed(number if seed is None else seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, weight in linear_views(model).items():
        leaf = path.rsplit(".", 1)[-1]
        if leaf not in (spec.expert_targets if ".experts." in path else spec.targets):
            continue
        if ".experts." in path and spec.expert_width == "shared":
            path = shared_path(path)
            if kind == "lora" or f"{path}.oft_R" in tensors:
                continue
        rows, columns = weight.shape
        if kind == "oft":
            b = spec.block_size
            draw = torch.randn(columns // b, b, b, generator=generator) * 0.1
            tensors[f"{path}.oft_R"] = torch.linalg.matrix_exp(draw - draw.transpose(1, 2)).bfloat16()
        else:
            tensors[f"{path}.lora_A"] = (torch.randn(spec.rank, columns, generator=generator) * 0.3).bfloat16()
            tensors[f"{path}.lora_B"] = (torch.randn(rows, spec.rank, generator=generator) * 0.1).bfloat16()
    only = AdapterSpec(
        kind=kind,
        targets=spec.targets,
        expert_targets=spec.expert_targets,
        expert_width=spec.expert_width,
        block_size=spec.block_size if kind == "oft" else 0,
        rank=spec.rank if kind == "lora" else 0,
        scaling=spec.scaling if kind == "lora" else 1.0,
    )
    return make_version(number, only, tensors)


def shared_path(path: str) -> str:
    """The path of the rotation that the experts' gate and up share, from that of one of an expert's weights."""
    return path.partition(".experts.")[0] + ".experts.gate_up_proj"


class Reference:
    """The transformers model under one version at a time."""

    def __init__(self, model):
        self.model = model
        self.views = linear_views(model)
        self.base = {path: weight.clone() for path, weight in self.views.items()}

    def logprobs(self, token_ids: list[int], version: AdapterVersion | None, temperature: float = 1.0) -> torch.Tensor:
        """float32 log-softmax [tokens - 1, vocabulary] of the tokens that follow each position."""
        for path, weight in self.views.items():
            weight.copy_(self.base[path])
            if version is not None:
                weight.copy_(self._adapted(path, version))
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1].float()
        return torch.log_softmax(logits / temperature, dim=-1)

    def _adapted(self, path: str, version: AdapterVersion) -> torch.Tensor:
        weight, tensors = self.base[path], version.tensors
        if ".experts." in path and not path.endswith("down_proj") and f"{shared_path(path)}.oft_R" in tensors:
            path = shared_path(path)
        if f"{path}.oft_R" in tensors:
            return weight @ torch.block_diag(*tensors[f"{path}.oft_R"].float()).T
        if f"{path}.lora_A" in tensors:
            low_rank = tensors[f"{path}.lora_B"].float() @ tensors[f"{path}.lora_A"].float()
            return weight + version.spec.scaling * low_rank
        return weight

    def gap(self, prompt: list[int], completion: Completion, version, temperature: float = 1.0) -> float:
        """Largest |log-prob difference| over the sampled tokens."""
        table = self.logprobs(prompt + completion.token_ids, version, temperature)[len(prompt) - 1 :]
        want = table.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
        return float((want - torch.tensor(completion.logprobs)).abs().max())
