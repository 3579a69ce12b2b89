"""No knob without manual and reader, no recipe that does not compose, a default config that changes on purpose."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.config.fields import FIELDS
from orbit_cli.config.locate import recipe_names
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.serialize import to_yaml

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("default_config.yaml")
RECIPES = [
    "kimi_shaped_h200.yaml",
    "main_job.yaml",
    "smoke_dense_oft.yaml",
    "smoke_mla_moe.yaml",
    "smoke_moe_lora.yaml",
    "sweep_adapters.yaml",
    "sweep_learning_rate.sh",
    "upcycled_moe_h200.yaml",
]
HEADER = ("Hardware:", "Cost:", "Expected curve:", "Date:")
MAX_RECIPE_LINES = 40


def attributes_read() -> set[str]:
    """Names that are read as an attribute somewhere in the package, the schema's own checks apart."""
    found = set()
    for path in (ROOT / "src" / "orbit_cli").rglob("*.py"):
        if "schema" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
    return found


def test_every_field_has_a_manual() -> None:
    assert [path for path, field in FIELDS.items() if len(field.manual) < 4] == []


def test_every_field_is_read_somewhere() -> None:
    read = attributes_read()
    assert [path for path in FIELDS if path.rpartition(".")[2] not in read] == []


def test_the_default_config_changes_on_purpose() -> None:
    """After a wanted change: orbit train --cfg job > tests/architecture/default_config.yaml"""
    assert to_yaml(compose([])) == SNAPSHOT.read_text(), self_help()


def self_help() -> str:
    return test_the_default_config_changes_on_purpose.__doc__ or ""


def test_the_list_of_recipes_is_the_folder() -> None:
    assert sorted(path.name for path in (ROOT / "recipes").iterdir()) == RECIPES
    assert recipe_names() == [name.removesuffix(".yaml") for name in RECIPES if name.endswith(".yaml")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_has_its_header(name: str) -> None:
    text = (ROOT / "recipes" / name).read_text()
    lines = text.splitlines()
    assert len(lines) <= MAX_RECIPE_LINES
    header = "\n".join(line for line in lines[:12] if line.startswith("#"))
    assert [word for word in HEADER if word not in header] == []
    assert re.search(r"Date: 20\d\d-[01]\d", header)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith(".yaml")])
def test_a_recipe_composes(name: str) -> None:
    config = compose([f"recipe={name.removesuffix('.yaml')}"])
    assert type(config) is OrbitConfig
    config.check_trainable()


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith(".sh")])
def test_a_shell_recipe_is_valid_and_uses_valid_overrides(name: str) -> None:
    path = ROOT / "recipes" / name
    subprocess.run(["bash", "-n", str(path)], check=True)
    for command in re.findall(r"^\s*orbit train (.*)$", path.read_text(), flags=re.MULTILINE):
        compose([part.replace('"$rate"', "1e-3").replace('"', "").replace("$", "") for part in command.split()])
