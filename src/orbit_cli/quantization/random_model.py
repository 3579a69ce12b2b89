"""Freshly initialised checkpoints for tests and benchmarks, as normal Hugging Face folders.

transformers gives names and shapes (on the meta device); numbers are seeded by tensor name, so no tensor depends on the
others. Written as engines read it: one tensor per expert, and for MLA models the older names of the rope settings.
"""

from __future__ import annotations

import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from orbit_cli.config.schema.architecture import NUMBERS
from orbit_cli.config.schema.base import ModelConfig
from orbit_cli.errors import ConfigError
from orbit_cli.quantization.files import copy_side_files, save_tensors, write_json
from orbit_cli.quantization.gguf import GgufReader, shipped_smollm2

RANDOM_VERSION = 1
"""Raised whenever the same settings give other weights."""


def write_random_checkpoint(model: ModelConfig, folder: Path) -> None:
    """Write config.json, model.safetensors (bfloat16) and tokenizer files into the existing empty folder.

    Matrices are normal with standard deviation model.init_scale, norms 1, biases 0. Raises ConfigError for an
    architecture that transformers does not know or whose vocabulary is smaller than the tokenizer's.
    """
    from transformers import AutoModelForCausalLM

    config = _build_config(model)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, empty in network.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            shapes |= _file_tensors(name, tuple(empty.shape))
    initial = functools.partial(_initial, seed=model.init_seed, scale=model.init_scale)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one tensor's numbers come from one thread
        tensors = dict(zip(shapes, pool.map(initial, shapes, shapes.values()), strict=True))
    save_tensors(tensors, folder / "model.safetensors")
    _write_tokenizer(model, folder, config.vocab_size)
    write_json(folder / "config.json", _config_json(config, type(network).__name__))


def _build_config(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # of SmolLM2's tokenizer
    fields = {**special, **model.architecture}
    model_type = fields.pop("model_type")
    fields |= {name: float(fields[name]) for name in NUMBERS if isinstance(fields.get(name), int)}
    try:
        return AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"model.architecture of type {model_type} is refused by transformers: {why}; correct model.architecture"
        ) from error


def _config_json(config: Any, architecture: str) -> dict[str, Any]:
    content = {**config.to_dict(), "architectures": [architecture], "dtype": "bfloat16"}
    if "kv_lora_rank" in content:  # SGLang's MLA models read the names that DeepSeek's own config.json has
        rope = content.pop("rope_parameters")
        content["rope_theta"] = rope["rope_theta"]
        kind = rope.get("rope_type", "default")
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
        content["rope_scaling"] = None if kind == "default" else {**scaling, "type": kind, "rope_type": kind}
        content.update(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, ep_size=1)
    return content


def _file_tensors(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """What one entry of the state dict is called in a file; transformers 5 holds all experts in one tensor."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith(".experts") or len(shape) != 3:
        return [(name, shape)]
    experts, rows, columns = shape
    halves = [("gate_proj", rows // 2), ("up_proj", rows // 2)]
    parts = halves if last == "gate_up_proj" else [(last, rows)]
    return [(f"{prefix}.{e}.{part}.weight", (size, columns)) for e in range(experts) for part, size in parts]


def _initial(name: str, shape: tuple[int, ...], seed: int, scale: float) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape, dtype=torch.float32)
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)


def _write_tokenizer(model: ModelConfig, folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    if model.tokenizer is None:
        GgufReader(shipped_smollm2()).write_side_files(folder)
    else:
        copy_side_files(Path(model.tokenizer).expanduser(), folder)
    if not (folder / "tokenizer.json").exists():
        return
    needed = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    if vocab_size < needed:
        raise ConfigError(
            f"model.architecture.vocab_size={vocab_size} is smaller than the tokenizer's {needed} tokens; "
            f"set model.architecture.vocab_size={needed}"
        )
