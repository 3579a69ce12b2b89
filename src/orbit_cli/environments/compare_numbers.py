"""Which of two numbers is larger? The task of the main job: short, verifiable, and not yet mastered by a small model.

A single turn, graded by environment.reward. The larger number stands first in half of the questions, so neither place
nor any fixed answer is worth more than chance.
"""

from __future__ import annotations

import random

from orbit_cli.environments.protocol import EnvironmentSetup, Step, derived_seed, is_held_out
from orbit_cli.errors import ConfigError
from orbit_cli.types import Prompt


class CompareNumbers:
    """Pairs of different whole numbers of `digits` digits."""

    def __init__(self, setup: EnvironmentSetup, digits: int = 2) -> None:
        if not 1 <= digits <= 9:
            raise ConfigError(f"environment.params.digits={digits} must be from 1 to 9")
        self.name, self.max_turns = setup.name, setup.max_turns
        self._setup = setup
        self._low, self._high = 10 ** (digits - 1), 10**digits - 1

    def train_prompt(self, index: int) -> Prompt:
        """Pair `index`, drawn from (seed, index); held-out pairs are left out."""
        return self._prompt(f"train/{index}", random.Random(derived_seed("train", self._setup.seed, index)), False)

    def eval_prompts(self, count: int) -> list[Prompt]:
        """`count` distinct held-out pairs, the same for every seed."""
        pairs = (self._high - self._low) * (self._high - self._low + 1)
        if count > pairs // 8:
            raise ConfigError(
                f"evaluation.prompts={count} needs more pairs than environment.params.digits gives; lower it to "
                f"{pairs // 8} or raise environment.params.digits"
            )
        rng, found = random.Random("held-out pairs"), {}
        while len(found) < count:
            prompt = self._prompt(f"eval/{len(found)}", rng, True)
            found.setdefault(prompt.messages[-1]["content"], prompt)
        return list(found.values())

    def step(self, prompt: Prompt, responses: list[str]) -> Step:
        """Grade the response."""
        return self._setup.single_turn(prompt, responses)

    def close(self) -> None:
        """Close the grader."""
        self._setup.close()

    def _prompt(self, key: str, rng: random.Random, held_out: bool) -> Prompt:
        while True:
            first, second = rng.sample(range(self._low, self._high + 1), 2)
            text = f"Which number is larger, {first} or {second}? Answer with the number only."
            if is_held_out(text) == held_out:
                break
        return Prompt(
            id=f"{self.name}/{key}",
            messages=self._setup.messages(text),
            answer=str(max(first, second)),
            environment=self.name,
            metadata={"numbers": [first, second]},
        )
