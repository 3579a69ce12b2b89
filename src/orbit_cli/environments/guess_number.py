"""A multi-turn game: find a secret number by guessing, told each time whether it is higher or lower.

An environment that answers back, small enough to read in a minute:
`environment.kind=python environment.target=orbit_cli.environments.guess_number:GuessNumber environment.max_turns=5`.
It scores itself, so it needs no grader.
"""

from __future__ import annotations

import random
import re

from orbit_cli.environments.protocol import EnvironmentSetup, Step, derived_seed, is_held_out
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.grade import Grade
from orbit_cli.types import Prompt

NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """Games with a secret in a range of `span` numbers that starts anywhere up to `highest_start`.

    The reward is 1 for the secret and 0 after max_turns guesses without it; the number of guesses is in the parts.
    """

    def __init__(self, setup: EnvironmentSetup, span: int = 16, highest_start: int = 50) -> None:
        if setup.max_turns < 2:
            raise ConfigError(
                f"environment.max_turns={setup.max_turns} lets the policy guess once, without any hint; set at least 2"
            )
        if span < 4 or highest_start < 1:
            raise ConfigError(
                f"environment.params.span={span} and highest_start={highest_start} leave nothing to guess; "
                "set span to 4 and highest_start to 1 or more"
            )
        self.name, self.max_turns = setup.name, setup.max_turns
        self._setup, self._span, self._highest_start = setup, span, highest_start

    def train_prompt(self, index: int) -> Prompt:
        """Game `index`: start of the range and secret are drawn from (seed, index), held-out games left out."""
        rng = random.Random(derived_seed("train", self._setup.seed, index))
        while True:
            low, secret = self._draw(rng)
            if not is_held_out(f"{low} {secret}"):
                return self._prompt(f"train/{index}", low, secret)

    def eval_prompts(self, count: int) -> list[Prompt]:
        """Distinct held-out games."""
        games = [
            (low, secret)
            for low in range(1, self._highest_start + 1)
            for secret in range(low, low + self._span)
            if is_held_out(f"{low} {secret}")
        ]
        if count > len(games):
            raise ConfigError(
                f"evaluation.prompts={count} is more than the {len(games)} held-out games; lower it, or raise "
                "environment.params.span or highest_start"
            )
        random.Random("held-out games").shuffle(games)
        return [self._prompt(f"eval/{number}", *game) for number, game in enumerate(games[:count])]

    def step(self, prompt: Prompt, responses: list[str]) -> Step:
        """Compare the first number of the last response with the secret."""
        secret = prompt.metadata["secret"]
        number = NUMBER.search(responses[-1])
        guess = int(number.group()) if number else None
        if guess == secret or len(responses) >= self.max_turns:
            return self._end(guess, secret, len(responses))
        return Step(done=False, messages=[{"role": "user", "content": _hint(guess, secret)}], grade=None)

    def close(self) -> None:
        """Nothing to release."""
        self._setup.close()

    def _end(self, guess: int | None, secret: int, guesses: int) -> Step:
        found = guess == secret
        grade = Grade(
            reward=float(found),
            parts={"found": float(found), "guesses": float(guesses)},
            answer=None if guess is None else str(guess),
            correct=found,
        )
        return Step(done=True, messages=[], grade=grade)

    def _draw(self, rng: random.Random) -> tuple[int, int]:
        low = rng.randint(1, self._highest_start)
        return low, rng.randint(low, low + self._span - 1)

    def _prompt(self, key: str, low: int, secret: int) -> Prompt:
        high = low + self._span - 1
        text = (
            f"I think of a whole number from {low} to {high}. Guess it: answer with one number each time, and I say "
            "whether mine is higher or lower."
        )
        return Prompt(
            id=f"{self.name}/{key}",
            messages=self._setup.messages(text),
            answer=str(secret),
            environment=self.name,
            metadata={"secret": secret, "low": low, "high": high},
        )


def _hint(guess: int | None, secret: int) -> str:
    if guess is None:
        return "Answer with one number."
    return "Higher." if guess < secret else "Lower."
