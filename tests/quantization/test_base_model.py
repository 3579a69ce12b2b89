"""The base of a run: made once, cached by content, shared by processes; and random models as engines read them."""

import os
import shlex
import subprocess
import sys

import pytest
import torch
from made_up_checkpoints import moe_tensors, write_checkpoint

from orbit_cli.config.compose import compose
from orbit_cli.config.schema.base import ModelConfig, ModelSource, NumberFormat, QuantizationConfig
from orbit_cli.errors import ConfigError
from orbit_cli.quantization.base_model import base_checksum, base_origin, prepare_base
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.convert import quantize_checkpoint
from orbit_cli.quantization.tensor import QuantizedTensor

VOCAB = 49152
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 512}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 128}  # fmt: skip
ARCHITECTURES = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32,
                  "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v3": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 32,
                    "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
                    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8,
                    "rope_parameters": YARN},
}  # fmt: skip


def random_model(name: str, **change) -> ModelConfig:
    return ModelConfig(name=name, source=ModelSource.random, architecture=COMMON | ARCHITECTURES[name] | change)


def int4(tmp_path) -> QuantizationConfig:
    return QuantizationConfig(cache_dir=str(tmp_path / "cache"))


def silent(message: str) -> None:
    """Takes notifications and says nothing."""


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_random_models_load_in_transformers_as_they_were_configured(tmp_path, name):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    bf16 = QuantizationConfig(format=NumberFormat.bf16, cache_dir=str(tmp_path / "cache"))
    folder = prepare_base(random_model(name), bf16, silent)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCAB
    config = AutoConfig.from_pretrained(folder)
    asked = COMMON | ARCHITECTURES[name]
    rope = asked.pop("rope_parameters", {})
    assert {key: getattr(config, key) for key in asked} == asked
    assert {key: config.rope_parameters[key] for key in rope} == rope
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8).unsqueeze(0)).logits).all()
    weight = model.model.layers[1].self_attn.o_proj.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (model.model.norm.weight == 1).all()


def test_experts_are_stored_one_by_one_and_mla_has_the_names_engines_read(tmp_path):
    moe = CheckpointReader(prepare_base(random_model("qwen3_moe"), int4(tmp_path), silent))
    for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        tensor = moe.linear(f"model.layers.1.mlp.experts.3.{part}")
        assert isinstance(tensor, QuantizedTensor) and tensor.shape == shape
    assert isinstance(moe.linear("model.layers.0.mlp.gate"), torch.Tensor)
    mla = CheckpointReader(prepare_base(random_model("deepseek_v3"), int4(tmp_path), silent))
    config = mla.config
    assert config["rope_theta"] == 5e4 and config["rope_scaling"]["type"] == "yarn" and "rope_parameters" not in config
    assert config["topk_method"] == "noaux_tc" and config["scoring_func"] == "sigmoid"
    assert mla.tensor("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
    for name in ("self_attn.kv_b_proj", "self_attn.q_a_proj", "mlp.shared_experts.up_proj", "mlp.experts.0.down_proj"):
        assert isinstance(mla.linear(f"model.layers.1.{name}"), QuantizedTensor)


def test_seed_decides_the_weights(tmp_path):
    folders = {}
    for cache, seed in (("a", 0), ("b", 0), ("c", 1)):
        model = random_model("llama")
        model.init_seed = seed
        folders[cache] = prepare_base(model, QuantizationConfig(cache_dir=str(tmp_path / cache)), silent)
    assert base_checksum(folders["a"]) == base_checksum(folders["b"]) != base_checksum(folders["c"])
    assert folders["a"].name == folders["b"].name != folders["c"].name


def test_made_once_then_found(tmp_path):
    said: list[str] = []
    first = prepare_base(random_model("llama"), int4(tmp_path), said.append)
    assert len(said) == 2 and "first use" in said[0] and "Base ready" in said[1]
    assert prepare_base(random_model("llama"), int4(tmp_path), said.append) == first and len(said) == 2
    assert first.parent == tmp_path / "cache" / "bases"
    left = {path.name for path in first.parent.iterdir() if not path.name.endswith(".lock")}
    assert left == {first.name}


def test_a_checkpoint_in_the_format_is_used_in_place(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", moe_tensors())
    quantize_checkpoint(plain, tmp_path / "int4", QuantizationConfig())
    model = ModelConfig(name="m", path=str(tmp_path / "int4"))
    assert prepare_base(model, int4(tmp_path), silent) == tmp_path / "int4"
    model.path = str(plain)
    bf16 = QuantizationConfig(format=NumberFormat.bf16, cache_dir=str(tmp_path / "cache"))
    assert prepare_base(model, bf16, silent) == plain
    made = prepare_base(model, int4(tmp_path), silent)
    assert base_checksum(made) == base_checksum(tmp_path / "int4")


def test_a_changed_checkpoint_is_converted_again(tmp_path):
    model = ModelConfig(name="m", path=str(write_checkpoint(tmp_path / "one", moe_tensors(0))))
    first = prepare_base(model, int4(tmp_path), silent)
    model.path = str(write_checkpoint(tmp_path / "two", moe_tensors(1)))
    second = prepare_base(model, int4(tmp_path), silent)
    assert first != second and base_checksum(first) != base_checksum(second)
    narrower = int4(tmp_path)
    narrower.targets = ["mlp"]
    assert prepare_base(model, narrower, silent) != second


def test_bad_settings(tmp_path):
    with pytest.raises(ConfigError, match="needs model.path"):
        prepare_base(ModelConfig(name="m"), int4(tmp_path), silent)
    with pytest.raises(ConfigError, match="vocab_size=300 is smaller than the tokenizer's 49152"):
        prepare_base(random_model("llama", vocab_size=300), int4(tmp_path), silent)
    with pytest.raises(ConfigError, match="type no_such_model is refused"):
        prepare_base(random_model("llama", model_type="no_such_model"), int4(tmp_path), silent)
    model = random_model("llama")
    model.tokenizer = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="model.tokenizer=.*nowhere is no folder"):
        prepare_base(model, int4(tmp_path), silent)


def test_two_processes_at_once(tmp_path):
    code = (
        "import sys\n"
        "from orbit_cli.config.schema.base import *\n"
        "from orbit_cli.quantization.base_model import *\n"
        "model = ModelConfig(name='m', path=sys.argv[1])\n"
        "base = prepare_base(model, QuantizationConfig(cache_dir=sys.argv[2]), lambda m: print(m, file=sys.stderr))\n"
        "print(base, base_checksum(base))\n"
    )
    source = write_checkpoint(tmp_path / "source", moe_tensors(), shards=3)
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "cache")]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    ends = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    assert ends[0][0] == ends[1][0]
    assert sum("first use" in err for _, err in ends) == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"format": NumberFormat.mxfp4, "targets": ["experts"], "ignore": ["lm_head", r"re:.*layers\.0\..*"]}],
)
def test_the_command_of_its_origin_makes_the_same_base(tmp_path, settings):
    write_checkpoint(tmp_path / "source", moe_tensors())
    model = ModelConfig(name="mine", source=ModelSource.checkpoint, path=str(tmp_path / "source"))
    quantization = QuantizationConfig(cache_dir=str(tmp_path / "cache"), **settings)
    base = prepare_base(model, quantization, silent)
    command = shlex.split(base_origin(model, quantization, base).split("`")[1])
    assert command[:4] == ["orbit", "quantize", str(tmp_path / "source"), base.name]
    quantize_checkpoint(tmp_path / "source", tmp_path / "again", compose(command[4:]).quantization)
    assert base_checksum(tmp_path / "again") == base_checksum(base)


def test_the_origin_of_what_no_command_makes(tmp_path):
    write_checkpoint(tmp_path / "source", moe_tensors())
    model = ModelConfig(name="mine", source=ModelSource.checkpoint, path=str(tmp_path / "source"))
    plain = QuantizationConfig(format=NumberFormat.bf16, cache_dir=str(tmp_path / "cache"))
    assert base_origin(model, plain, prepare_base(model, plain, silent)).endswith("source, used as it is.")
    assert "random weights" in base_origin(random_model("qwen3"), int4(tmp_path), tmp_path / "qwen3-int4-x")
    shipped = ModelConfig(name="smollm2", source=ModelSource.smollm2)
    said = base_origin(shipped, int4(tmp_path), tmp_path / "smollm2-int4-x")
    assert "`orbit quantize smollm2 smollm2-int4-x quantization.format=int4`" in said
