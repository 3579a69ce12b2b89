"""Environments of a user for the tests: one that works and one that lacks half of the protocol."""

from __future__ import annotations

from orbit_cli.environments.protocol import EnvironmentSetup, Step
from orbit_cli.types import Prompt

A_NUMBER = 3


class Echo:
    """Asks for a word; graded by the grader of the config."""

    def __init__(self, setup: EnvironmentSetup, word: str, times: int = 1) -> None:
        self.name, self.max_turns = setup.name, setup.max_turns
        self.setup, self.answer = setup, " ".join([word] * times)

    def train_prompt(self, index: int) -> Prompt:
        messages = self.setup.messages(f"Say {self.answer}")
        return Prompt(id=f"{self.name}/{index}", messages=messages, answer=self.answer, environment=self.name)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [self.train_prompt(-1 - n) for n in range(count)]

    def step(self, prompt: Prompt, responses: list[str]) -> Step:
        return self.setup.single_turn(prompt, responses)

    def close(self) -> None:
        self.setup.close()


class Half:
    """No environment."""

    name = "half"

    def __init__(self, setup: EnvironmentSetup) -> None:
        self.step = None
