"""What a run was trained on is where `orbit eval run.adapter=RUN` starts from; the command line goes before it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_cli.config.adapter_run import compose_served
from orbit_cli.config.compose import compose, to_typed
from orbit_cli.config.explain import explain
from orbit_cli.config.provenance import provenance
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.serialize import to_yaml
from orbit_cli.errors import ConfigError

OWN = ["recipe=smoke_mla_moe", "seed=3", "model.init_seed=7", "rollout.max_new_tokens=11", "hardware.threads=1"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(to_yaml(compose([*OWN, "evaluation.prompts=5"])))
    return tmp_path


def served(run: Path, *overrides: str) -> tuple[OrbitConfig, str]:
    found = compose_served([f"run.adapter={run}", *overrides])
    config = to_typed(found.composition.raw)
    return config, found.note(config) or ""


def test_the_runs_own_config_is_the_default(run: Path) -> None:
    config, note = served(run)
    trained = compose([*OWN, "evaluation.prompts=5"])
    for section in ("model", "quantization", "adapter", "environment", "evaluation", "engine", "hardware"):
        assert getattr(config, section) == getattr(trained, section)
    assert (config.rollout.max_new_tokens, config.rollout.max_prompt_tokens) == (11, trained.rollout.max_prompt_tokens)
    assert config.run.name is None and config.seed == 0 and config.trainer == compose([]).trainer
    assert note.startswith(f"run.adapter={run}: model, quantization, ") and "trained with" not in note


def test_the_command_line_goes_before_it(run: Path) -> None:
    config, note = served(run, "evaluation.prompts=9", "rollout.max_new_tokens=3", "environment.params={min_terms:4}")
    assert (config.evaluation.prompts, config.rollout.max_new_tokens) == (9, 3)
    assert config.environment.params["min_terms"] == 4 and config.model.init_seed == 7
    config, note = served(run, "environment=compare_numbers", "model.init_seed=8")
    assert config.environment == compose([]).environment and config.model.name == "tiny_mla_moe"
    assert "it was trained with model.init_seed=7 and is served with 8" in note
    config, note = served(run, "recipe=smoke_dense_oft")
    assert config.model == compose(["recipe=smoke_dense_oft"]).model
    assert "the recipe says it all" in note and "trained with model.name=tiny_mla_moe" in note


def test_what_would_change_the_adapter_is_refused(run: Path, tmp_path: Path) -> None:
    """What it has already may be said again."""
    own = compose(OWN).adapter
    for said in (f"adapter={own.kind}", f"adapter.block_size={own.block_size}", f"adapter.targets={own.targets}"):
        assert served(run, said.replace("'", ""))[0].adapter == own
    for said in (f"adapter.block_size={own.block_size * 2}", "adapter=lora", "adapter.kind=lora", "adapter.layers=[0]"):
        for more in ([], ["recipe=smoke_dense_oft"], ["model=tiny_moe"]):
            with pytest.raises(
                ConfigError, match=f"^{re.escape(said)} would do nothing beside .*; leave .* out, or set"
            ):
                served(run, said, *more)
    folder = tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    assert served(folder, "adapter=lora", "adapter.rank=8", "adapter.alpha=16")[0].adapter.rank == 8
    assert served(folder, "adapter=lora", "adapter.expert_width=per_expert")[0].adapter.kind == "lora"
    for said, has in (("adapter=oft", "kind=lora"), ("adapter.rank=16", "rank=8"), ("adapter.layers=[1]", "files say")):
        with pytest.raises(
            ConfigError, match=f"^{re.escape(said)} would do nothing beside run.adapter={folder}: .*{has}"
        ):
            served(folder, said)


def test_the_width_of_experts_is_compared_as_well(tmp_path: Path) -> None:
    shared = ["adapter=oft", "adapter.expert_width=shared", "adapter.expert_targets=[gate_proj,up_proj]"]
    (tmp_path / "config.yaml").write_text(to_yaml(compose([*OWN, *shared])))
    assert served(tmp_path)[0].adapter.expert_width == served(tmp_path, shared[1])[0].adapter.expert_width == "shared"
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "OFT", "expert_width": "shared"}')
    width = "adapter.expert_width=per_expert"
    with pytest.raises(ConfigError, match=f"^{width} would do nothing .* was made with expert_width=shared"):
        served(tmp_path, width)


def test_values_that_only_fit_the_run(run: Path) -> None:
    """Two samples are too few for the default pass@4, and enough for the run's pass@2."""
    assert served(run, "evaluation.samples=2")[0].evaluation.pass_k == [1, 2]
    with pytest.raises(ConfigError, match=r"evaluation\.pass_k has 2"):
        served(run, "evaluation.samples=1")


def test_where_values_come_from(run: Path) -> None:
    overrides = [f"run.adapter={run}", "evaluation.prompts=9"]
    found = provenance(compose_served(overrides).composition)
    assert found["model.init_seed"] == (7, str(run / "config.yaml"))
    assert found["evaluation.prompts"] == (9, "command line")
    assert found["trainer.steps"][1] != str(run / "config.yaml")
    assert f"now      7, from {run / 'config.yaml'}" in explain("model.init_seed", overrides)


def test_a_peft_folder_names_no_config(run: Path) -> None:
    (run / "adapter_config.json").write_text("{}")
    config, note = served(run)
    assert config.model == compose([]).model and note == ""


def test_an_adapters_folder_leads_to_its_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = run / "adapters" / "000003"
    version.mkdir(parents=True)
    (version / "adapter_config.json").write_text("{}")
    whole, _ = served(run)
    config, note = served(version)
    assert replace(config, run=whole.run) == whole and config.run.adapter == str(version)
    assert note.startswith(f"run.adapter={version}: model, ") and "are those of its run's config.yaml" in note
    monkeypatch.chdir(run / "adapters")
    assert served(Path("000003"))[0].model == whole.model


def test_a_config_of_another_tool_beside_adapters_is_no_runs(run: Path) -> None:
    """A damaged one of a run is: the run's status.json lies beside it."""
    version = run / "adapters" / "mine"
    version.mkdir(parents=True)
    (version / "adapter_config.json").write_text("{}")
    (run / "config.yaml").write_text("adapter: lora\nmodel: {path: x}\n")
    config, note = served(version)
    assert config.model == compose([]).model and note == ""
    (run / "status.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        served(version)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "run-ten",
            "run-ten does not exist; set it to the folder of a run or of a PEFT adapter; did you mean run-one\\?",
        ),
        ("some/where/else", "some/where/else does not exist; set it to the folder of a run or of a PEFT adapter"),
        ("run-one/config.yaml", "config.yaml is no folder; set it to .*"),
        (
            "run-one/adapters/000002",
            "000002 does not exist; .*/adapters has 000000, 000003: the versions that were evaluated .* and the last "
            "one; set it to one of these",
        ),
        ("empty", "empty is neither a PEFT folder .* nor a run folder .*; set it to .*"),
    ],
)
def test_a_folder_that_cannot_be_an_adapters_is_said_first(given: str, sentence: str, tmp_path: Path) -> None:
    """The rest is wrong too, but only beside the config of another run: two samples have no pass@4."""
    (tmp_path / "run-one").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "run-one" / "config.yaml").write_text(to_yaml(compose(OWN)))
    for version in ("000000", "000003"):
        (tmp_path / "run-one" / "adapters" / version).mkdir(parents=True)
        (tmp_path / "run-one" / "adapters" / version / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"^run.adapter={tmp_path}/.*{sentence}$"):
        served(tmp_path / given, "evaluation.samples=2")


@pytest.mark.parametrize("given", ["", "' '"])
def test_an_empty_shell_variable_is_not_the_base_alone(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^run.adapter= * names no folder, .*, or leave it out for the base alone$"):
        compose_served([f"run.adapter={given}"])


def test_a_damaged_config_is_named(run: Path) -> None:
    (run / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        served(run)


def test_rows_that_a_run_was_trained_on_are_not_held_out_for_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join('{"problem": "1 + 1", "answer": "2"}' for _ in range(40)))
    own = ["recipe=smoke_dense_oft", "environment=math_file", f"environment.path={rows}", "evaluation.prompts=8"]
    (tmp_path / "config.yaml").write_text(to_yaml(compose(own)))

    def check(*overrides: str) -> None:
        found = compose_served([f"run.adapter={tmp_path}", *overrides])
        found.check(to_typed(found.composition.raw))

    check()
    check("evaluation.prompts=4")
    check("evaluation.prompts=32", f"environment.eval_path={rows}")
    with pytest.raises(ConfigError, match="would take rows .* held out the last 8; set evaluation.prompts=8"):
        check("evaluation.prompts=32")
    with pytest.raises(ConfigError, match="held out the last 8"):
        check("experiment=main_job")


def test_a_run_without_its_config_is_said_to_lack_it(run: Path) -> None:
    (run / "status.json").write_text("{}")
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="without its config.yaml"):
        compose_served([f"run.adapter={run}"])
