"""The registry of scorers, and which of them may run inside this process."""

from __future__ import annotations

from collections.abc import Callable

from orbit_cli.config.schema.learning import RewardConfig, RewardKind
from orbit_cli.rewards.math_answer import math_scorer
from orbit_cli.rewards.python_function import python_scorer
from orbit_cli.rewards.reasoning_gym_task import TaskSpec, task_scorer
from orbit_cli.rewards.score import Scorer
from orbit_cli.rewards.text_match import exact_scorer, regex_scorer

SCORERS: dict[RewardKind, Callable[[RewardConfig, TaskSpec | None], Scorer]] = {
    RewardKind.task: task_scorer,
    RewardKind.exact: lambda config, task: exact_scorer(config),
    RewardKind.math: lambda config, task: math_scorer(config),
    RewardKind.regex: lambda config, task: regex_scorer(config),
    RewardKind.python: lambda config, task: python_scorer(config),
}


def build_scorer(config: RewardConfig, task: TaskSpec | None) -> Scorer:
    """The scorer of a config. Raises ConfigError for fields that are missing or wrong."""
    return SCORERS[config.kind](config, task)


def is_bounded(config: RewardConfig) -> bool:
    """Whether scoring takes a time that nothing in a response can stretch: comparing strings, and nothing else.

    Even a regular expression can backtrack for hours, without ever releasing the interpreter's lock.
    """
    return config.kind is RewardKind.exact and config.extract is None
