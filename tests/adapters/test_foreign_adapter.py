"""An adapter of another model is told before an engine is started, by the first linear that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orbit_cli.adapters.bundle import make_version
from orbit_cli.config.compose import compose
from orbit_cli.errors import CheckpointError
from orbit_cli.runs.adapters import ServedAdapter
from orbit_cli.types import AdapterSpec

QUERY = "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.7.down_proj"
SHARED = "model.layers.1.mlp.experts.gate_up_proj"


def base(folder: Path, model: str) -> Path:
    (folder / "config.json").write_text(json.dumps(compose([f"model={model}"]).model.architecture))
    return folder


def adapter(**shapes: tuple[int, ...]) -> ServedAdapter:
    """Of kind OFT or LoRA by its tensors, which are named with / for the dots."""
    kind = "oft" if all(name.endswith("oft_R") for name in shapes) else "lora"
    spec = AdapterSpec(kind=kind, targets=("q_proj",), block_size=32, rank=4)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return ServedAdapter(name="mine", version=make_version(1, spec, tensors), trained_on="tiny_moe-int4-1234")


@pytest.mark.parametrize(
    "shapes",
    [
        {f"{QUERY}.oft_R": (2, 32, 32), f"{EXPERT}.oft_R": (2, 32, 32)},
        {f"{QUERY}.oft_R": (2, 32, 32), f"{SHARED}.oft_R": (2, 32, 32)},
        {f"{QUERY}.lora_A": (4, 64), f"{QUERY}.lora_B": (128, 4), f"{EXPERT}.lora_B": (64, 4)},
    ],
)
def test_its_own_model(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    adapter(**shapes).check(base(tmp_path, "tiny_moe"))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({f"{QUERY}.oft_R": (4, 32, 32)}, f"its adapter for {QUERY} has 128 inputs, and this model's linear has 64"),
        ({f"{QUERY}.lora_A": (4, 32)}, "has 32 inputs, and this model's linear has 64"),
        ({f"{QUERY}.lora_B": (32, 4)}, "has 32 outputs, and this model's linear has 128"),
        ({"model.layers.2.self_attn.q_proj.oft_R": (2, 32, 32)}, "this model has no such linear"),
        ({"model.layers.1.mlp.experts.8.up_proj.oft_R": (2, 32, 32)}, "this model has no such linear"),
        ({"model.layers.1.mlp.up_proj.oft_R": (2, 32, 32)}, "this model has no such linear"),
        ({f"{SHARED}.oft_R": (4, 32, 32)}, f"its adapter for {SHARED} has 128 inputs, and this model's linear has 64"),
        ({"model.layers.2.mlp.experts.gate_up_proj.oft_R": (2, 32, 32)}, "this model has no such linear"),
    ],
)
def test_another_model(shapes: dict[str, tuple[int, ...]], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        adapter(**shapes).check(base(tmp_path, "tiny_moe"))
    sentence = str(caught.value)
    assert sentence.startswith("run.adapter: mine was trained on another model (tiny_moe-int4-1234): ")
    assert words in sentence and "\n" not in sentence


def test_a_family_that_is_not_known_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    adapter(**{f"{QUERY}.oft_R": (9, 32, 32)}).check(tmp_path)
