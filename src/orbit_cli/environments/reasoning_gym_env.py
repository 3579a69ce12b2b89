"""Reasoning-gym tasks as an environment: all of them, by name and parameters.

Training and held-out tasks are told apart by their question text (`protocol.is_held_out`): a training index whose item
falls into the held-out quarter takes the same index of another stream. Opening and scoring is in
`rewards/reasoning_gym_task.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from orbit_cli.environments.protocol import EnvironmentSetup, Step, derived_seed, is_held_out
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.reasoning_gym_task import TaskSpec, open_dataset, seeded_globals
from orbit_cli.types import Prompt

STREAMS = 64  # streams tried for one training index; 64 misses in a row mean that nearly all questions are held out
CHUNK = 256  # items of one dataset object: a few tasks make all their items when they are opened
PATIENCE = 1000  # items drawn in a row without a new held-out question, until the task counts as exhausted


class ReasoningGymEnvironment:
    """Single-turn tasks made on demand.

    Raises ConfigError for an unknown task or parameter, or a value that the task refuses.
    """

    def __init__(self, setup: EnvironmentSetup, task: TaskSpec, size: int) -> None:
        if size < 1:
            raise ConfigError(f"environment.size={size} leaves no task to train on; set at least 1")
        self.name, self.max_turns = setup.name, setup.max_turns
        self._setup, self._task, self._size = setup, task, size
        self._open = functools.lru_cache(maxsize=8)(functools.partial(_open_chunk, task))
        self._item("train", f"{setup.seed}/0", 0)  # refuses a wrong task here and now

    def train_prompt(self, index: int) -> Prompt:
        """Task `index` modulo environment.size: after that many, the tasks repeat."""
        number = index % self._size
        for stream in range(STREAMS):
            entry = self._item("train", f"{self._setup.seed}/{stream}", number)
            if not is_held_out(entry["question"]):
                return self._prompt(f"train/{number}", entry)
        raise ConfigError(
            f"environment.task={self._task.name} with these parameters has too few different questions to hold some "
            "out; widen environment.params"
        )

    def eval_prompts(self, count: int) -> list[Prompt]:
        """Distinct held-out questions, from a stream of their own that does not depend on the seed."""
        found: dict[str, dict[str, Any]] = {}
        number = last_new = 0
        while len(found) < count and number - last_new < PATIENCE:
            entry = self._item("eval", "held-out", number)
            number += 1
            if is_held_out(entry["question"]) and entry["question"] not in found:
                found[entry["question"]] = entry
                last_new = number
        if len(found) < count:
            raise ConfigError(
                f"evaluation.prompts={count} is more than the {len(found)} different held-out questions that "
                f"environment.task={self._task.name} has with these parameters; lower it, or widen environment.params"
            )
        return [self._prompt(f"eval/{n}", entry) for n, entry in enumerate(found.values())]

    def step(self, prompt: Prompt, responses: list[str]) -> Step:
        """Grade the response."""
        return self._setup.single_turn(prompt, responses)

    def close(self) -> None:
        """Stop the grader's processes."""
        self._setup.close()

    def _item(self, split: str, stream: str, number: int) -> dict[str, Any]:
        chunk, position = divmod(number, CHUNK)
        dataset = self._open(split, stream, chunk)
        with seeded_globals(dataset.seed + position):
            return dataset[position]

    def _prompt(self, key: str, entry: dict[str, Any]) -> Prompt:
        answer = entry["answer"]
        return Prompt(
            id=f"{self.name}/{key}",
            messages=self._setup.messages(entry["question"]),
            answer=None if answer is None else str(answer),
            environment=self.name,
            metadata={"entry": entry},
        )


def _open_chunk(task: TaskSpec, split: str, stream: str, chunk: int) -> Any:
    seed = derived_seed(split, stream, chunk)
    with seeded_globals(seed):
        return open_dataset(task, seed, CHUNK)
