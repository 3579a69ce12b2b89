"""Reasoning-gym tasks by name and parameters: opening a dataset, and the task's own score as a scorer.

Prompts, splits and seeds are the environment's; this file only knows how a task is named, opened and scored.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orbit_cli.config.schema.learning import RewardConfig
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.extraction import last_group
from orbit_cli.rewards.score import Score, Scorer
from orbit_cli.rewards.text_match import compile_field
from orbit_cli.types import Prompt

OURS = ("seed", "size")  # parameters that every task has and that the environment sets itself
GLOBAL_RANDOM = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task.

    >>> TaskSpec(name="chain_sum", params={"min_terms": 2, "max_terms": 2})
    """

    name: str
    params: dict[str, Any]


def open_dataset(task: TaskSpec, seed: int, size: int) -> Any:
    """A reasoning-gym dataset: item i depends on (seed, i) only, and is made when it is asked for.

    Raises:
        ConfigError: no task of this name, no parameter of this name, or a value that the task refuses.
    """
    import reasoning_gym.composite  # registers the task "composite" beside the others
    from reasoning_gym.factory import DATASETS, create_dataset

    if task.name not in DATASETS:
        raise ConfigError(
            f"environment.task={task.name} is no reasoning-gym task; {_nearest(task.name, sorted(DATASETS))}"
        )
    known = [f.name for f in dataclasses.fields(DATASETS[task.name][1]) if f.name not in OURS]
    for name in task.params:
        if name in OURS:
            setting = "seed" if name == "seed" else "environment.size"
            raise ConfigError(f"environment.params.{name} is set by Orbit for every task; set {setting} instead")
        if name not in known:
            raise ConfigError(
                f"environment.params.{name} is no parameter of the task {task.name}; {_nearest(name, known)}"
            )
    params = dict(task.params)
    try:
        if task.name == "composite":
            spec = functools.partial(reasoning_gym.composite.DatasetSpec, weight=1.0, config={})
            params["datasets"] = [spec(**part) for part in params.get("datasets", [])]
        return create_dataset(task.name, seed=seed, size=size, **params)
    except (AssertionError, ValueError, TypeError) as error:  # what the tasks' own validation raises
        given = ", ".join(f"{key}={value}" for key, value in task.params.items()) or "its defaults"
        raise ConfigError(
            f"the task {task.name} refuses {given}: {error or type(error).__name__}; correct environment.params"
        ) from error


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Run with the global generators of `random` and numpy seeded, and restore them afterwards.

    A few tasks draw from them, or reseed them: without this their items are not reproducible, and every item made would
    set back the run's own random numbers. One thread at a time.
    """
    import numpy as np

    with GLOBAL_RANDOM:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def task_scorer(config: RewardConfig, task: TaskSpec | None) -> Scorer:
    """The task's own score, between 0 and 1, of the stripped response (or of what `extract` finds in it)."""
    if task is None:
        raise ConfigError(
            "environment.reward.kind=task scores reasoning-gym tasks only; set exact, math, regex or python instead"
        )
    dataset = open_dataset(task, seed=0, size=1)
    extract = compile_field(config.extract, "environment.reward.extract") if config.extract else None

    def score(response: str, prompt: Prompt) -> Score:
        answer = last_group(extract, response) if extract else response.strip()
        if answer is None:
            return Score(0.0, None)
        return Score(float(dataset.score_answer(answer, prompt.metadata["entry"])), answer)

    return score


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    return f"did you mean {', '.join(nearest)}?" if nearest else f"there are {', '.join(known)}"
