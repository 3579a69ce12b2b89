"""Parameters as a plan reads them, from source, are those that the tasks have when they are imported."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.environments import params
from orbit_cli.environments.guess_number import GuessNumber
from orbit_cli.errors import ConfigError


def test_every_task_and_parameter_is_found() -> None:
    import reasoning_gym.composite  # registers one more
    from reasoning_gym.factory import DATASETS

    assert reasoning_gym.composite and set(params._tasks()) == set(DATASETS)
    for name, (_, config) in DATASETS.items():
        assert set(params._task(name)) == {field.name for field in dataclasses.fields(config)} - {"seed", "size"}


def test_a_class_of_ours() -> None:
    declared = params._class("orbit_cli.environments.guess_number:GuessNumber")
    signature = list(inspect.signature(GuessNumber).parameters.values())[1:]
    assert declared == {one.name: (one.annotation, str(one.default)) for one in signature}
    assert params._class("orbit_cli.environments.guess_number:Nobody") is None


@pytest.mark.parametrize(
    "override", ["min_terms=2.5", "min_terms=true", "allow_negation=1", "min_term=2", "max_terms=null"]
)
def test_a_stray_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.params\.\w+(=| is no parameter)"):
        params.check_environment(compose(["environment=chain_sum", f"environment.params.{override}"]).environment)


def test_what_only_the_task_can_judge_is_left_to_it() -> None:
    for override in ("environment.params.min_terms=9", "environment.params.allow_negation=true"):
        params.check_environment(compose(["environment=chain_sum", override]).environment)
    params.check_environment(compose(["environment.target=mine:Class", "environment.params={x:1}"]).environment)
