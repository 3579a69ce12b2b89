"""Environments for the tests, built from a config as a run builds them, and closed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from orbit_cli.config.schema.learning import EnvironmentConfig, EnvironmentKind, RewardConfig, RewardKind
from orbit_cli.environments.protocol import Environment
from orbit_cli.environments.registry import build_environment


@pytest.fixture
def make_environment() -> Iterator[Callable[..., Environment]]:
    made = []

    def make(kind: str, *, seed: int = 0, held_out: int = 4, reward: str = "exact", **fields: object) -> Environment:
        config = EnvironmentConfig(
            name="test", kind=EnvironmentKind(kind), reward=RewardConfig(kind=RewardKind(reward)), **fields
        )
        made.append(build_environment(config, seed, held_out))
        return made[-1]

    yield make
    for environment in made:
        environment.close()
