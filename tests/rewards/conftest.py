"""Graders for the tests: closed afterwards, with the user's module on the path of this process and of the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbit_cli.config.schema.learning import RewardConfig, RewardKind
from orbit_cli.rewards.grade import Grader, build_grader
from orbit_cli.types import Prompt


def prompt(answer: str | None = "5", **metadata: object) -> Prompt:
    return Prompt(id="test/1", messages=[], answer=answer, environment="test", metadata=metadata)


@pytest.fixture(scope="module")
def make_grader() -> Iterator[Callable[..., Grader]]:
    made = []

    def make(kind: str, *, task=None, workers: int = 1, **fields: object) -> Grader:
        made.append(build_grader(RewardConfig(kind=RewardKind(kind), **fields), task, workers))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield make
        for grader in made:
            grader.close()


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., Prompt]:
    return prompt
