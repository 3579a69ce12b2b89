"""Grading a response: the reward, its parts, the extracted answer, and whether it is correct.

A grader that raises, hangs or returns NaN makes a failure (reward None and an error text), which the run counts and
leaves out of baseline and loss; it never makes a silent 0. Which scorers there are is in `scorers.py`; those that could
hang run in worker processes (`pool.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from orbit_cli.config.schema.learning import RewardConfig, RewardKind
from orbit_cli.rewards.pool import WorkerPool
from orbit_cli.rewards.reasoning_gym_task import TaskSpec
from orbit_cli.rewards.score import GradeFailure, Scorer
from orbit_cli.rewards.scorers import build_scorer, is_bounded
from orbit_cli.rewards.text_match import compile_field
from orbit_cli.types import Prompt

WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """Outcome of one response.

    >>> Grade(reward=1.0, parts={"exact": 1.0}, answer="5", correct=True)
    >>> Grade(reward=None, error="the grader took longer than 10 s and was stopped")
    """

    reward: float | None  # None: it could not be graded
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    correct: bool | None = None  # None exactly where reward is
    error: str | None = None


class Grader:
    """Grades responses, from any thread."""

    def __init__(self, name: str, score: Scorer, correct_above: float, close: Callable[[], None] | None = None) -> None:
        self._name, self._score, self._correct_above, self._close = name, score, correct_above, close

    def grade(self, response: str, prompt: Prompt) -> Grade:
        """Grade one response. Never raises for what the scorer does; see `Grade`."""
        try:
            score = self._score(response, prompt)
            value = float(score.value)
            if not math.isfinite(value):
                raise ValueError(f"the reward is {value}")
        except GradeFailure as failure:
            return Grade(reward=None, error=str(failure))
        except Exception as error:  # a scorer is foreign code: whatever it raises is one counted failure
            return Grade(reward=None, error=f"{type(error).__name__}: {error}")
        return Grade(reward=value, parts={self._name: value}, answer=score.answer, correct=value >= self._correct_above)

    def close(self) -> None:
        """Stop worker processes, if there are any. They also end with this process."""
        if self._close:
            self._close()


def build_grader(config: RewardConfig, task: TaskSpec | None = None, workers: int = WORKERS) -> Grader:
    """The grader of a config.

    Args:
        config: the reward group. task: the reasoning-gym task, for kind=task. workers: processes at most; none is
            started where scoring is only a comparison of strings.

    Raises:
        ConfigError: a field is missing, is no regular expression, or names a function that cannot be imported.
    """
    if is_bounded(config):
        return Grader(config.kind, build_scorer(config, task), config.correct_above)
    if config.extract:
        compile_field(config.extract, "environment.reward.extract")
    if config.kind in (RewardKind.regex, RewardKind.task):
        build_scorer(config, task)  # refuses bad fields here and now; the other kinds are slow or foreign to import
    pool = WorkerPool((config, task), workers, config.timeout_s)
    if config.kind is RewardKind.python:
        pool.check()
    return Grader(config.kind, pool.score, config.correct_above, pool.close)
