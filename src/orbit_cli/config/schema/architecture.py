"""model.architecture of a model that is built from it: fields, types and what must divide what, without transformers.

The fields are those of transformers' config classes (tests/config compares them) that decide what is built. A field
that a class does not have would be ignored without a word, so it is refused. Left out: published models, whose
architecture is compared with their own config.json.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from orbit_cli.errors import ConfigError

LARGEST = 1 << 40
WHOLES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings", "max_window_layers", "sliding_window",
          "decoder_sparse_step", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "n_routed_experts",
          "n_shared_experts", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
          "n_group", "topk_group", "first_k_dense_replace", "pretraining_tp")  # fmt: skip
NUMBERS = ("rms_norm_eps", "initializer_range", "attention_dropout", "router_aux_loss_coef", "routed_scaling_factor",
           "rope_theta")  # fmt: skip
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window", "norm_topk_prob",
         "output_router_logits", "rope_interleave")  # fmt: skip
NONE_TOO = (
    "num_key_value_heads",
    "q_lora_rank",
    "sliding_window",
    "n_group",
    "topk_group",
)  # null is a value of theirs
ZERO_TOO = ("first_k_dense_replace", "n_shared_experts", "max_window_layers")
ANYTHING = ("model_type", "hidden_act", "rope_parameters", "rope_scaling", "layer_types", "mlp_only_layers",
            "pad_token_id", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "architectures",
            "transformers_version")  # fmt: skip

EVERY = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "initializer_range", "attention_dropout",
         "rope_theta", "tie_word_embeddings", "attention_bias", "use_cache")  # fmt: skip
OWN = {
    "llama": ("head_dim", "mlp_bias", "pretraining_tp"),
    "qwen3": ("head_dim", "use_sliding_window", "sliding_window", "max_window_layers"),
    "qwen3_moe": ("head_dim", "use_sliding_window", "sliding_window", "decoder_sparse_step", "moe_intermediate_size",
                  "num_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits",
                  "router_aux_loss_coef"),
    "deepseek_v3": ("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
                    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_group",
                    "topk_group", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor",
                    "rope_interleave", "pretraining_tp"),
}  # fmt: skip
# field -> the field that it must divide
DIVIDES = {"num_key_value_heads": "num_attention_heads", "n_group": "n_routed_experts"}
AT_MOST = (
    ("num_experts_per_tok", "num_experts"),
    ("num_experts_per_tok", "n_routed_experts"),
    ("topk_group", "n_group"),
)
ROTARY = ("head_dim", "qk_rope_head_dim")  # turned in pairs


def check_architecture(fields: Mapping[str, Any]) -> None:
    """Refuse an architecture that transformers refuses, or would build into a model that cannot run.

    Raises ConfigError. Model types that are not trained are left to whoever knows them.
    """
    kind = fields.get("model_type")
    if kind not in OWN:
        return
    for name, value in fields.items():
        _check_field(kind, name, value)
    for name, whole in DIVIDES.items():
        part, of = fields.get(name), fields.get(whole)
        if part and of and of % part:
            raise _odd(name, part, f"does not divide {whole}={of}; set one of {_divisors(of)}")
    for name, bound in AT_MOST:
        if fields.get(name) and fields.get(bound) and fields[name] > fields[bound]:
            raise _odd(name, fields[name], f"is more than {bound}={fields[bound]}; set at most {fields[bound]}")
    for name in ROTARY:
        if (fields.get(name) or 0) % 2:
            raise _odd(name, fields[name], f"is odd, and positions turn pairs of numbers; set {fields[name] + 1}")
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    derived = kind in ("llama", "qwen3_moe") and not fields.get("head_dim") and hidden and heads
    if derived and hidden % (2 * heads):
        more = f"set {2 * heads}, {4 * heads} or another, or model.architecture.head_dim"
        raise _odd("hidden_size", hidden, f"is no even multiple of num_attention_heads={heads}; {more}")


def _check_field(kind: str, name: str, value: Any) -> None:
    known = (*EVERY, *OWN[kind], *ANYTHING)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join((*EVERY, *OWN[kind]))}"
        raise ConfigError(f"model.architecture.{name}={value} is set, and a {kind} has no such field; {hint}")
    if name in ANYTHING or (value is None and name in NONE_TOO):
        return
    if name in WHOLES:
        least = 0 if name in ZERO_TOO else 1
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise _odd(name, value, f"must be a whole number; set {least} or more")
    elif name in NUMBERS and (
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST
    ):
        raise _odd(name, value, f"must be a number; set for example {1e-6 if name == 'rms_norm_eps' else 1.0}")
    elif name in FLAGS and not isinstance(value, bool):
        raise _odd(name, value, "must be true or false; set one of them")


def _odd(name: str, value: Any, why: str) -> ConfigError:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return ConfigError(f"model.architecture.{name}={shown} {why}")


def _divisors(number: int) -> str:
    """Of a number of heads or experts; the largest are enough.

    >>> _divisors(12)
    '12, 6, 4, 3, 2, 1'
    """
    found = [number // part for part in range(1, min(number, 1000) + 1) if number % part == 0]
    return ", ".join(map(str, found[:8]))
