"""model.architecture of random models is judged when the config is composed, by the fields that transformers has."""

from __future__ import annotations

import dataclasses

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.config.schema import architecture as room
from orbit_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "override", "sentence"),
    [
        ("tiny_dense", "rms_norm_eps=abc", r"rms_norm_eps=abc must be a number; set for example 1e-06"),
        ("tiny_dense", "tie_word_embeddings=abc", r"tie_word_embeddings=abc must be true or false"),
        ("tiny_dense", "hidden_size=64.0", r"hidden_size=64\.0 must be a whole number; set 1 or more"),
        ("tiny_dense", "num_hidden_layers=null", r"num_hidden_layers=null must be a whole number"),
        ("tiny_dense", "num_attention_heads=3", r"num_key_value_heads=2 does not divide num_attention_heads=3; set"),
        ("tiny_dense", "head_dim=33", r"head_dim=33 is odd"),
        ("tiny_dense", "hiden_size=65", r"hiden_size=65 is set, and a qwen3 has no such .*did you mean hidden_size"),
        ("tiny_dense", "num_experts=4", r"a qwen3 has no such field"),
        ("tiny_dense", "vocab_size=300", r"vocab_size=300 is smaller than the tokenizer's 49152 tokens; set"),
        ("tiny_moe", "num_experts_per_tok=9", r"num_experts_per_tok=9 is more than num_experts=8; set at most 8"),
        ("tiny_mla_moe", "n_group=3", r"n_group=3 does not divide n_routed_experts=8"),
        ("tiny_mla_moe", "qk_rope_head_dim=15", r"qk_rope_head_dim=15 is odd"),
    ],
)
def test_what_cannot_be_built_is_refused(model: str, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose([f"model={model}", f"model.architecture.{override}"])


@pytest.mark.parametrize("model_type", sorted(room.OWN))
def test_the_fields_are_those_of_transformers(model_type: str) -> None:
    """Names and types; rope_theta is a key that its configs read without declaring it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    declared = {field.name: str(field.type) for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    for name in {*room.EVERY, *room.OWN[model_type]} - {"rope_theta"}:
        if name == "head_dim" and model_type == "qwen3_moe":
            continue  # its attention reads it where it is there
        kinds = declared[name]
        word = "int" if name in room.WHOLES else "float" if name in room.NUMBERS else "bool"
        assert word in kinds, (name, kinds)
        assert ("None" in kinds) >= (name in room.NONE_TOO) or model_type == "qwen3_moe", (name, kinds)
    ours = {*room.EVERY, *room.OWN[model_type], *room.ANYTHING}
    general = {"output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"}
    general |= {"id2label", "label2id", "problem_type"}
    assert set(declared) - ours == general


def test_a_whole_number_is_a_number() -> None:
    config = compose(["model=tiny_dense", "model.architecture.rope_theta=10000"])
    assert config.model.architecture["rope_theta"] == 10000
