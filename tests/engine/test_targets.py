"""What the engine refuses before it starts."""

import pytest

from orbit_cli.engine.targets import check_targets
from orbit_cli.errors import ConfigError
from orbit_cli.types import AdapterSpec

SPEC = AdapterSpec(kind="lora", targets=("q_proj",), rank=4)


def test_a_tied_qwen3_moe_is_refused_because_its_lm_head_would_never_be_loaded():
    check_targets({"model_type": "qwen3_moe", "tie_word_embeddings": False}, SPEC)
    check_targets({"model_type": "qwen3", "tie_word_embeddings": True}, SPEC)
    with pytest.raises(ConfigError, match="tie_word_embeddings=true"):
        check_targets({"model_type": "qwen3_moe", "tie_word_embeddings": True}, SPEC)


def test_an_unknown_target_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="nearest: o_proj"):
        check_targets({"model_type": "llama"}, AdapterSpec(kind="oft", targets=("o_prj",), block_size=16))


def test_quantised_latent_attention_is_refused():
    spec = AdapterSpec(kind="oft", targets=("o_proj",), block_size=16)
    experts_only = {"ignore": ["re:.*self_attn.*", "lm_head"]}
    check_targets({"model_type": "deepseek_v3", "q_lora_rank": 8, "quantization_config": experts_only}, spec)
    with pytest.raises(ConfigError, match="quantization.targets=.experts."):
        check_targets({"model_type": "deepseek_v3", "q_lora_rank": 8, "quantization_config": {"ignore": []}}, spec)
