"""Converted checkpoints load in transformers unchanged, and what they compute is what our decoding says."""

import pytest
import torch

from orbit_cli.config.schema.base import ModelConfig, ModelSource, NumberFormat, QuantizationConfig
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.quantization.convert import quantize_checkpoint
from orbit_cli.quantization.formats import quantization_config
from orbit_cli.quantization.tensor import QuantizedTensor

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def reference_model(folder, dtype):
    """transformers' llama without any quantisation code, filled with our decoded weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    reader = CheckpointReader(folder)
    config = LlamaConfig(**{key: value for key, value in reader.config.items() if key != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    state = {}
    for module in reader.modules():
        weight = reader.linear(module)
        state[f"{module}.weight"] = (
            weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
        )
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys  # tied
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_smollm2_in_int4_agrees_with_our_decoding(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "smollm2"
    report = quantize_checkpoint("smollm2", folder, QuantizationConfig())
    assert report.quantized == 30 * 7 and report.relative_rms < 0.12
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = reference_model(folder, torch.float32)
    assert torch.equal(logits(loaded, ids["input_ids"]), logits(reference, ids["input_ids"]))
    answer = reference.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert loaded.generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("number_format", "dtype", "hidden"),
    [("mxfp4", torch.bfloat16, 96), ("nvfp4", torch.bfloat16, 80), ("fp8", torch.float32, 96)],
)
def test_other_formats_agree_with_our_decoding(tmp_path, number_format, dtype, hidden):
    from transformers import AutoModelForCausalLM

    architecture = {"model_type": "llama", "vocab_size": 49152, "hidden_size": hidden, "intermediate_size": 160,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}  # fmt: skip
    model = ModelConfig(name="tiny", source=ModelSource.random, architecture=architecture, init_scale=0.1)
    config = QuantizationConfig(format=NumberFormat(number_format), cache_dir=str(tmp_path))
    folder = prepare_base(model, config, lambda message: None)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.randint(0, 49152, (2, 17))
    expected = logits(reference_model(folder, dtype), ids)
    assert torch.equal(logits(loaded, ids), expected) and expected.std() > 0.1


def test_fp8_declares_activations_only_where_blocks_are_whole():
    section = quantization_config(NumberFormat.fp8, [], [256, 128])
    assert section["config_groups"]["group_0"]["input_activations"]["group_size"] == 128
    section = quantization_config(NumberFormat.fp8, [], [256, 96])
    assert section["config_groups"]["group_0"]["input_activations"] is None
