"""From the configs alone: the published tensor counts, element counts and bytes, to the last digit given.

moonshotai/Kimi-K2.5 (K2.6 has the same storage), deepseek-ai/DeepSeek-V4-Flash and -Pro: sums over the safetensors
headers of the published files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning import FRONTIER, composed, model_of

from orbit_cli.config.compose import compose
from orbit_cli.config.locate import group_options
from orbit_cli.errors import ConfigError
from orbit_cli.planner.checkpoint import facts_of
from orbit_cli.planner.families import published_rules, shape_of
from orbit_cli.planner.model import read_model
from orbit_cli.planner.shape import Category
from orbit_cli.planner.storage import stored, total

# stored elements, tensors, GiB, GB of files, parameters in billions
FILES = {
    "kimi_k26": (170_738_182_128, 208_550, "554.27", "595.15", "1026.88"),
    "deepseek_v4_flash": (158_069_433_298, 69_187, "148.65", "159.61", "290.94"),
    "deepseek_v4_pro": (861_608_274_846, 145_116, "805.32", "864.70", "1598.84"),
}
# (parameters in billions, GB), as far as the published table goes
CATEGORIES = {
    "kimi_k26": {
        Category.experts: ("1014.686", "570.761"),
        Category.attention: ("6.168", "12.337"),
        Category.shared: ("2.642", "5.285"),
        Category.dense: ("0.396", "0.793"),
        Category.embeddings: ("2.349", "4.698"),
        Category.router: (None, "0.330"),
        Category.norms: (None, "0.002"),
        Category.vision: ("0.471", "0.942"),
    },
    "deepseek_v4_flash": {
        Category.experts: ("277.025", "147.170"),
        Category.attention: ("4.599", "4.599"),
        Category.shared: ("1.082", "1.082"),
        Category.embeddings: ("1.059", "2.118"),
        Category.compressor: (None, "0.526"),
        Category.indexer: (None, "0.275"),
        Category.hyper: (None, "0.136"),
        Category.router: (None, "0.090"),
        Category.hash_table: (None, "0.019"),
        Category.norms: (None, "0.001"),
        Category.mtp: ("6.610", "3.594"),
    },
    "deepseek_v4_pro": {
        Category.experts: ("1547.396", "822.054"),
        Category.attention: ("18.293", "18.295"),
        Category.shared: ("4.030", "4.030"),
        Category.embeddings: ("1.853", "3.707"),
        Category.compressor: (None, "1.345"),
        Category.indexer: (None, "0.625"),
        Category.hyper: (None, "0.336"),
        Category.router: (None, "0.336"),
        Category.hash_table: (None, "0.019"),
        Category.norms: (None, "0.002"),
        Category.mtp: ("25.840", "13.957"),
    },
}


@pytest.mark.parametrize("name", FRONTIER)
def test_files_to_the_last_digit(name: str) -> None:
    facts = facts_of(composed(f"model={name}").model)
    shape = shape_of(facts)
    found = total(shape, published_rules(facts))
    elements, tensors, gib, gb, parameters = FILES[name]
    assert (found.elements, found.tensors) == (elements, tensors)
    assert f"{found.nbytes / 2**30:.2f}" == gib
    assert f"{found.nbytes / 1e9:.2f}" == gb
    assert f"{sum(w.parameters for w in shape.weights if w.plain != 'i64') / 1e9:.2f}" == parameters
    assert model_of(name).checkpoint_bytes == model_of(name).base_bytes == found.nbytes


@pytest.mark.parametrize("option", group_options("quantization"))
@pytest.mark.parametrize("name", FRONTIER)
def test_files_of_mixed_formats_are_used_as_they_are_or_refused(name: str, option: str) -> None:
    """DeepSeek V4 is FP4 experts beside FP8: mxfp4 names it, bf16 asks for no format, the rest are other models."""
    overrides = (f"model={name}", f"quantization={option}")
    if name != "kimi_k26" and option not in ("mxfp4", "bf16"):
        with pytest.raises(
            ConfigError, match="MXFP4 experts beside FP8, which Orbit uses as .* set quantization=mxfp4"
        ):
            read_model(composed(*overrides))
        return
    model = read_model(composed(*overrides))
    as_published = option in ("bf16", "mxfp4" if name != "kimi_k26" else "int4", "int4_experts")
    assert (model.base_bytes == model.checkpoint_bytes) is as_published
    assert f"{model.checkpoint_bytes / 1e9:.2f}" == FILES[name][3]


def test_experts_that_were_converted_are_another_model(tmp_path: Path) -> None:
    config = composed("model=deepseek_v4_flash").model.architecture | {"expert_dtype": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = ["model=deepseek_v4_flash", f"model.path={tmp_path}"]
    with pytest.raises(ConfigError, match="hold FP8 experts, which Orbit uses as they are; set quantization=fp8"):
        read_model(compose(folder))
    model = read_model(compose([*folder, "quantization=fp8"]))
    assert model.base_bytes == model.checkpoint_bytes > 280e9


def test_a_format_that_no_linear_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="matches no linear of qwen3_4b that int4 can store"):
        read_model(composed("model=qwen3_4b", "quantization=int4_experts"))


@pytest.mark.parametrize("name", FRONTIER)
def test_categories(name: str) -> None:
    facts = facts_of(composed(f"model={name}").model)
    shape, rules = shape_of(facts), published_rules(facts)
    assert {weight.category for weight in shape.weights} == set(CATEGORIES[name])
    for category, (parameters, gigabytes) in CATEGORIES[name].items():
        weights = shape.of(category)
        nbytes = sum(stored(weight, rules).nbytes for weight in weights)
        assert f"{nbytes / 1e9:.3f}" == gigabytes, category
        if parameters is not None:
            assert f"{sum(weight.parameters for weight in weights) / 1e9:.3f}" == parameters, category


def test_without_what_predicts_ahead() -> None:
    """What trainer and engine load: 595.15, 156.02 and 850.75 GB, of 1026.88, 284.33 and 1573.00 B parameters."""
    gigabytes, billions = [], []
    for name in FRONTIER:
        model = model_of(name)
        gigabytes.append(f"{sum(held.nbytes(2) for held in model.held) / 1e9:.2f}")
        loaded = [w for w in model.shape.weights if w.category is not Category.mtp and w.plain != "i64"]
        billions.append(f"{sum(w.parameters for w in loaded) / 1e9:.2f}")
    assert gigabytes == ["595.15", "156.02", "850.75"]
    assert billions == ["1026.88", "284.33", "1573.00"]


@pytest.mark.parametrize(
    ("name", "active", "without_input"),
    [("kimi_k26", "33.3", "32.2"), ("deepseek_v4_flash", "13.8", "13.3"), ("deepseek_v4_pro", "49.8", "48.9")],
)
def test_active_parameters(name: str, active: str, without_input: str) -> None:
    shape = model_of(name).shape
    assert f"{shape.active_parameters / 1e9:.1f}" == active
    inputs = shape.vocabulary * shape.hidden
    assert f"{(shape.active_parameters - inputs) / 1e9:.1f}" == without_input


@pytest.mark.parametrize(
    ("name", "expert_mb", "layer_gb"),
    [
        ("kimi_k26", ("24.77", "88.1"), ("9.51", "33.8")),
        ("deepseek_v4_flash", ("13.37", "50.3"), ("3.42", "12.9")),
        ("deepseek_v4_pro", ("35.09", "132.1"), ("13.48", "50.7")),
    ],
)
def test_one_expert_and_one_layer(name: str, expert_mb: tuple[str, str], layer_gb: tuple[str, str]) -> None:
    model = model_of(name)
    weights = model.shape.of(Category.experts)
    layers, experts = len(weights[0].layers), model.shape.experts
    coded = sum(stored(weight, model.rules).nbytes for weight in weights) / layers
    plain = sum(2 * weight.parameters for weight in weights) / layers
    assert (f"{coded / experts / 1e6:.2f}", f"{plain / experts / 1e6:.1f}") == expert_mb
    assert (f"{coded / 1e9:.2f}", f"{plain / 1e9:.1f}") == layer_gb


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_4b", 4_022_468_096),
        ("llama32_1b", 1_235_814_400),
        ("smollm2_360m", 361_821_120),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_parameters_of_smaller_models(name: str, parameters: int) -> None:
    assert model_of(name).shape.parameters == parameters


def test_active_parameters_of_qwen3() -> None:
    assert f"{model_of('qwen3_30b_a3b').shape.active_parameters / 1e9:.2f}" == "3.35"
