"""Every mistake in a config is one sentence that names it, says what is accepted and gives the nearest valid name."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.config.overrides import read_overrides
from orbit_cli.errors import ConfigError

# overrides, words that the sentence must have
SHARED, GATE_UP = ["model=tiny_moe", "adapter.expert_width=shared"], "adapter.expert_targets=[gate_proj,up_proj]"
MISTAKES = [
    (["adapter.blok_size=3"], ["adapter.blok_size", "neumann_terms", "did you mean adapter.block_size"]),
    (["trainer.learning_rat=3"], ["trainer.learning_rat", "did you mean trainer.learning_rate"]),
    (["+trainer.stepps=3"], ["trainer.stepps", "did you mean trainer.steps"]),
    (["=x"], ["a key is missing before =", "write key=value"]),
    (["model=null"], ["model=null", "smollm2_135m"]),
    (["steps=3"], ["no key steps", "did you mean trainer.steps"]),
    (["rollout.learning_rate=3"], ["rollout.learning_rate", "did you mean trainer.learning_rate"]),
    (["enviroment.task=x"], ["enviroment.task", "did you mean environment.task"]),
    (["engine.tpp=4"], ["engine.tpp"]),
    (["+engine.tpp=4"], ["engine.tpp"]),
    (["adaptor=oft"], ["adaptor", "did you mean adapter"]),
    (["adapter=ofd"], ["adapter=ofd", "lora, oft", "did you mean oft"]),
    (["model=tiny_mo"], ["model=tiny_mo", "smollm2_135m", "did you mean tiny_moe"]),
    (["adapter=null"], ["adapter", "lora, oft"]),
    (["optim/adam=1"], ["optim/adam", "groups are model"]),
    (["recipe=smoke_moe_lra"], ["recipe=smoke_moe_lra", "main_job", "did you mean smoke_moe_lora"]),
    (["recipe=no/such.yaml"], ["no/such.yaml", "no such file"]),
    (["recipe=main_job", "recipe=smoke_dense_oft"], ["main_job", "smoke_dense_oft", "one recipe"]),
    (["adapter.kind=lorra"], ["adapter.kind=lorra", "oft, lora", "did you mean lora"]),
    (["trainer.steps=abc"], ["trainer.steps=abc", "whole number"]),
    (["trainer.steps=2.5"], ["trainer.steps=2.5", "whole number"]),
    (["trainer.steps=true"], ["trainer.steps=True", "whole number"]),
    (["trainer.learning_rate=fast"], ["trainer.learning_rate=fast", "number"]),
    (["trainer.learning_rate=1E999"], ["trainer.learning_rate=inf", "number"]),
    (["evaluation.base=perhaps"], ["evaluation.base=perhaps", "true or false"]),
    (["seed=null"], ["seed=null", "whole number"]),
    (["adapter.targets=q_proj"], ["adapter.targets=q_proj", "list", "adapter.targets=[a,b]"]),
    (["model.path=/models/mine"], ["model.path=/models/mine", "does not read a folder", "model=checkpoint"]),
    (["model=tiny_moe", "model.path=/x"], ["model=tiny_moe", "model.source=random", "model=checkpoint"]),
    (["model.architecture.hidden_size=512"], ["hidden_size=512", "hidden_size=576", "model=tiny_dense"]),
    (["trainer={steps:3}"], ["trainer", "section"]),
    (["~trainer.steps"], ["trainer.steps", "cannot be removed"]),
    (["seed=1,2"], ["seed=1,2", "-m"]),
    (["seed"], ["seed", "key=value"]),
    (["run.name=[}"], ["run.name", "quotes"]),
    (["environment=math_file"], ["environment.path"]),
    (["algorithm.kl_coef=1"], ["algorithm.kl_coef", "kl=reward or kl=loss"]),
    (["rollout.group_size=1"], ["rollout.group_size=1", "2 or more"]),
    (["evaluation.pass_k=[1,99]"], ["99", "evaluation.samples"]),
    (["adapter.expert_width=share"], ["adapter.expert_width=share", "per_expert, shared", "did you mean shared"]),
    ([*SHARED, "adapter=lora", GATE_UP], ["expert_width=shared", "kind=lora", "set adapter=oft", "per_expert"]),
    ([*SHARED], ["expert_width=shared", "expert_targets=[],", f"set {GATE_UP}"]),
    (
        [*SHARED, "adapter.expert_targets=[up_proj]"],
        ["=[up_proj],", "gate_proj and up_proj both get", f"set {GATE_UP}"],
    ),
    (
        [*SHARED, f"{GATE_UP[:-1]},down_proj]"],
        ["down_proj],", "down_proj's input is each expert's own", f"set {GATE_UP}"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(o) for o, _ in MISTAKES])
def test_a_mistake_is_one_sentence(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert [word for word in words if word not in sentence] == []
    assert caught.value.exit_code == 2


# content of a person's recipe, words that the sentence must have
FILES = [
    ("trainer:\n  stepz: 7\n", ["trainer.stepz", "did you mean trainer.steps"]),
    ("trainer:\n  steps: seven\n", ["trainer.steps=seven", "whole number"]),
    ("logging:\n  wandb: off\n", ["logging.wandb=false", 'write "off"']),
    ("adapter:\n  kind: ofd\n", ["adapter.kind=ofd", "did you mean oft"]),
    ("defaults:\n  - override /model: tiny_moo\n", ["model=tiny_moo", "did you mean tiny_moe"]),
    ("trainer:\n  steps: 7\n wrong: [\n", ["line 4", "not valid YAML"]),
    ("- a\n- b\n", ["mapping"]),
]


@pytest.mark.parametrize(("content", "words"), FILES, ids=[content.split("\n")[0] for content, _ in FILES])
def test_a_mistake_in_a_file_names_the_file(content: str, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    path = folder / "wrong.yaml"
    path.write_text("# @package _global_\n" + content)
    with pytest.raises(ConfigError) as caught:
        compose([f"recipe={path}"])
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert [word for word in words if word not in sentence] == []


def test_a_recipe_in_a_folder_that_hydra_would_misread(tmp_path: Path) -> None:
    for name in ("adapter", "my recipes"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "r.yaml").write_text("# @package _global_\n")
        with pytest.raises(ConfigError, match="move it"):
            compose([f"recipe={folder / 'r.yaml'}"])


def test_sweeps_are_checked_value_by_value() -> None:
    assert read_overrides(["adapter=oft,lora", "seed=1,2"], sweep=True).overrides == ["adapter=oft,lora", "seed=1,2"]
    assert read_overrides(["run.name=2E3,b"], sweep=True).overrides == ["run.name='2E3',b"]
    assert read_overrides(["trainer.learning_rate=1e-5,1E-7"], sweep=True).overrides
    assert read_overrides(['adapter.targets=["q_proj"],["k_proj"]'], sweep=True).overrides
    for wrong in ("adapter=oft,lorra", "seed=1,b", "recipe=main_job,nothing", "adapter.kind=oft,lorra"):
        with pytest.raises(ConfigError):
            read_overrides([wrong], sweep=True)


def test_no_suggestion_is_better_than_a_senseless_one() -> None:
    for overrides in (["+trainer.foo=1"], ["=x"], ["model=null"]):
        with pytest.raises(ConfigError) as caught:
            compose(overrides)
        assert "did you mean" not in str(caught.value) and "None" not in str(caught.value)


def test_projections_that_share_a_rotation_are_named_in_any_order() -> None:
    for names in ("gate_proj,up_proj", "up_proj,gate_proj"):
        adapter = compose([*SHARED, f"adapter.expert_targets=[{names}]"]).adapter
        assert adapter.expert_width == "shared" and adapter.expert_targets == names.split(",")
