"""Where values come from, and what the manual of a key says."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_cli.config.compose import compose, compose_layers
from orbit_cli.config.explain import explain
from orbit_cli.config.provenance import provenance, provenance_table
from orbit_cli.config.resume import resumed_config
from orbit_cli.config.serialize import to_yaml
from orbit_cli.errors import ConfigError


def test_each_value_names_the_layer_that_set_it() -> None:
    found = provenance(compose_layers(["recipe=smoke_moe_lora", "trainer.steps=5", "model.architecture.num_experts=4"]))
    assert found["trainer.steps"] == (5, "command line")
    assert found["adapter.rank"] == (8, "recipes/smoke_moe_lora.yaml")
    assert found["adapter.kind"] == ("lora", "conf/adapter/lora.yaml")
    assert found["model.architecture.hidden_size"] == (64, "conf/model/tiny_moe.yaml")
    assert found["model.architecture.num_experts"] == (4, "command line")
    assert found["trainer.beta1"] == (0.9, "schema default")
    assert found["rollout.group_size"][1] == "conf/experiment/quick_look.yaml"


def test_a_layer_that_sets_the_same_value_still_wins() -> None:
    default = provenance(compose_layers([]))["adapter.block_size"]
    assert default == (32, "conf/adapter/oft.yaml")
    assert provenance(compose_layers(["adapter.block_size=32"]))["adapter.block_size"] == (32, "command line")


def test_every_value_shown_is_the_composed_one() -> None:
    composition = compose_layers(["algorithm=dapo"])
    for path, (value, _) in provenance(composition).items():
        node = composition.raw
        for part in path.split("."):
            node = node[part]
        assert str(getattr(node, "value", node)) == str(value) or list(node) == value


def test_the_table_has_a_line_per_key() -> None:
    lines = provenance_table(["trainer.steps=5"]).splitlines()
    line = next(line for line in lines if line.startswith("trainer.steps "))
    assert line.split() == ["trainer.steps", "5", "command", "line"]


def test_explain_a_key() -> None:
    text = explain("adapter.block_size")
    assert "size of the rotation blocks" in text
    assert "whole number" in text
    assert "32, from conf/adapter/oft.yaml" in text
    assert "one of grpo, dr_grpo" in explain("algorithm.advantage")


def test_explain_a_section_lists_its_keys_and_options() -> None:
    text = explain("adapter")
    assert "adapter=NAME with lora, oft" in text
    assert "adapter.neumann_terms" in text
    assert "quick_look" in explain("experiment")
    lines = explain("algorithm").splitlines()
    assert any(line.endswith("grpo: added to the group's (unbiased) standard deviation") for line in lines)
    assert any("grpo (2402.03300), dr_grpo" in line for line in lines)  # a paper's number ends no sentence


def test_explain_names_a_value_and_the_second_name_of_a_file() -> None:
    with pytest.raises(ConfigError, match="expert_parallel is a value of memory.trainer_layout"):
        explain("memory.expert_parallel")
    assert "h200 (the same as h200x1)" in " ".join(explain("hardware").split())
    assert " ..." not in explain("memory") + explain("model") + explain("hardware")


@pytest.mark.parametrize(
    ("key", "near"), [("adapter.blocksize", "adapter.block_size"), ("block_size", "adapter.block")]
)
def test_explain_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        explain(key)


def test_a_resumed_run_keeps_its_config_but_for_what_is_set(tmp_path: Path) -> None:
    from orbit_cli.config.compose import compose

    original = compose(["recipe=smoke_moe_lora", "seed=7"])
    (tmp_path / "config.yaml").write_text(to_yaml(original))
    resumed = resumed_config([f"run.resume={tmp_path}", "trainer.steps=9"], str(tmp_path))
    assert resumed.trainer.steps == 9
    assert resumed.seed == 7
    assert resumed.adapter == original.adapter
    for override in ("adapter=oft", "recipe=main_job", "experiment=main_job"):
        with pytest.raises(ConfigError, match="keeps its own"):
            resumed_config([f"run.resume={tmp_path}", override], str(tmp_path))


@pytest.mark.parametrize("size", [0, 60, 150, 400, 3000])
def test_a_config_that_was_cut_is_called_damaged(size: int, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(compose(["recipe=smoke_moe_lora"]))[:size])
    with pytest.raises(ConfigError) as caught:
        resumed_config([f"run.resume={tmp_path}"], str(tmp_path))
    sentence = str(caught.value)
    assert str(path) in sentence and "restore the file" in sentence and len(sentence.splitlines()) == 1
    assert "logging" in sentence or "YAML" in sentence
