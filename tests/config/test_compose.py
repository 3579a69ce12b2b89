"""Composing: overrides, groups and recipes in, typed dataclasses out, and values that YAML would misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_cli.config.compose import compose, compose_raw
from orbit_cli.config.locate import GROUPS, group_options
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import AdapterKind, NumberFormat
from orbit_cli.config.serialize import from_plain, read_yaml, to_plain, to_yaml
from orbit_cli.errors import ConfigError

# What an option needs beside it to be a whole config.
NEEDS = {
    ("model", "checkpoint"): ["model.path=/models/some"],
    ("environment", "math_file"): ["environment.path=train.jsonl"],
}


def test_defaults_are_typed() -> None:
    config = compose([])
    assert type(config) is OrbitConfig
    assert config.adapter.kind is AdapterKind.oft
    assert config.quantization.format is NumberFormat.int4
    assert isinstance(config.trainer.learning_rate, float)


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_a_group_composes(group: str) -> None:
    options = group_options(group)
    assert options
    for option in options:
        config = compose([f"{group}={option}", *NEEDS.get((group, option), [])])
        assert type(config) is OrbitConfig


def test_a_later_layer_wins() -> None:
    assert compose(["adapter=lora"]).adapter.kind is AdapterKind.lora
    assert compose(["adapter=lora", "adapter.rank=4"]).adapter.rank == 4
    assert compose(["recipe=smoke_moe_lora"]).adapter.rank == 8
    assert compose(["adapter.rank=4", "recipe=smoke_moe_lora"]).adapter.rank == 4
    assert compose(["recipe=smoke_moe_lora", "model=tiny_dense"]).model.name == "tiny_dense"


@pytest.mark.parametrize("spelling", ["recipe=main_job", "+recipe=main_job", "+recipes=main_job"])
def test_spellings_of_a_recipe(spelling: str) -> None:
    assert compose([spelling]) == compose(["recipe=main_job"])


def test_the_main_job_recipe_is_the_default() -> None:
    assert compose(["recipe=main_job"]) == compose([])


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "short.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /adapter: lora\ntrainer:\n  steps: 7\n"
    )
    config = compose([f"recipe={folder / 'short.yaml'}"])
    assert (config.adapter.kind, config.trainer.steps) == (AdapterKind.lora, 7)


# Values that YAML or Hydra's grammar read by their looks (https://github.com/facebookresearch/hydra/issues/2599, 999).


@pytest.mark.parametrize(("text", "number"), [("1e-5", 1e-5), ("1E-7", 1e-7), ("5e-5", 5e-5), ("3", 3.0)])
def test_small_floats_stay_floats(text: str, number: float, tmp_path: Path) -> None:
    assert compose([f"trainer.learning_rate={text}"]).trainer.learning_rate == number
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rate.yaml").write_text(f"# @package _global_\ntrainer:\n  learning_rate: {text}\n")
    assert compose([f"recipe={folder / 'rate.yaml'}"]).trainer.learning_rate == number


@pytest.mark.parametrize("text", ["2E3", "1E234", "010", "no", "1_000", "true", "v1.0", "null1"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    config = compose([f"run.name={text}", f"logging.tags=[a,{text}]"])
    assert config.run.name == text
    assert config.logging.tags == ["a", text]


def test_text_that_looks_like_a_number_in_a_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    path = folder / "named.yaml"
    path.write_text("# @package _global_\nrun:\n  name: 2E3\n")
    with pytest.raises(ConfigError, match=r"named.yaml: run.name=2000.0 must be text .* quote it"):
        compose([f"recipe={path}"])
    path.write_text("# @package _global_\nrun:\n  name: '2E3'\n")
    assert compose([f"recipe={path}"]).run.name == "2E3"


def test_octal_looks_and_yaml_booleans() -> None:
    assert compose(["trainer.steps=010"]).trainer.steps == 10
    assert compose(["evaluation.base=no"]).evaluation.base is False
    assert compose(["run.name=null"]).run.name is None
    assert compose(["logging.wandb=off"]).logging.wandb.value == "off"


def test_free_mappings_take_new_keys() -> None:
    config = compose(["model=tiny_moe", "model.architecture.num_experts=4", "model.architecture.rope_theta=1e4"])
    assert config.model.architecture["num_experts"] == 4
    assert config.model.architecture["rope_theta"] == 1e4
    assert compose(["engine.extra.page_size=1"]).engine.extra == {"page_size": 1}


def test_raw_and_typed_agree() -> None:
    raw = compose_raw(["trainer.steps=5"])
    assert raw.trainer.steps == compose(["trainer.steps=5"]).trainer.steps == 5


@pytest.mark.parametrize("name", ["2E3", "010", "no", "a: b", "null", "~", "ünï {x}"])
def test_a_config_survives_its_yaml(name: str, tmp_path: Path) -> None:
    config = compose(["model=tiny_mla_moe"])
    config.run.name = name
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert read_yaml(path) == config
    assert from_plain(to_plain(config), "here") == config
