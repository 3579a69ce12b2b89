"""A config.json that is no model's gives one sentence that names the key, never a traceback."""

import json
import re

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.errors import OrbitError
from orbit_cli.planner.plan import make_plan

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
LLAMA |= {"intermediate_size": 64}
MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def without(config: dict, key: str) -> dict:
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (without(MOE, "moe_intermediate_size"), "has no moe_intermediate_size"),
        (without(MOE, "num_experts_per_tok"), "has no num_experts_per_tok"),
        (MOE | {"head_dim": 0}, "head_dim=0 must be a whole number from 1"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads=0 must be a whole number from 1"),
        (LLAMA | {"text_config": "x"}, "text_config='x' must be a mapping"),
        (LLAMA | {"quantization_config": 3}, "quantization_config=3 must be a mapping"),
        (
            LLAMA | {"quantization_config": PACKED | {"ignore": 5}},
            "quantization_config.ignore=5 must be a list of names",
        ),
        (
            LLAMA | {"quantization_config": PACKED | {"config_groups": [1]}},
            "config_groups must be mappings",
        ),
    ],
)
def test_one_sentence(tmp_path, config: dict, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OrbitError, match=re.escape(words)) as refused:
        make_plan(compose(["model=checkpoint", f"model.path={tmp_path}", "hardware=h200x1"]))
    assert "\n" not in str(refused.value)


def test_what_no_parser_ends_with(tmp_path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(OrbitError, match="is not valid JSON"):
        make_plan(compose(["model=checkpoint", f"model.path={tmp_path}"]))
    with pytest.raises(OrbitError, match="is no folder"):
        make_plan(compose(["model=checkpoint", f"model.path=/{'x' * 5000}"]))
