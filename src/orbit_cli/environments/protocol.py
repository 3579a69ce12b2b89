"""What an environment is: tasks to train on, held-out tasks, and an answer to what the policy said.

Stateless between calls: a prompt is a function of (seed, index), and a step of (prompt, responses so far). So the
position in the data is one integer, any step can be repeated, and all methods can be called from any thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from orbit_cli.rewards.grade import Grade, Grader
from orbit_cli.types import Prompt

HELD_OUT_SHARE = 4  # one in four questions of a procedural task is held out


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The environment's reaction to the policy's latest response.

    >>> Step(done=False, messages=[{"role": "user", "content": "Higher."}], grade=None)
    >>> Step(done=True, messages=[], grade=Grade(reward=1.0, answer="5", correct=True))
    """

    done: bool
    messages: list[dict[str, str]]  # to append to the conversation, after the response; empty when done
    grade: Grade | None  # of the whole conversation; there exactly when done


class Environment(Protocol):
    """Tasks of one kind. `setup.name`, `setup.max_turns` and so on are in `EnvironmentSetup`."""

    name: str
    max_turns: int

    def train_prompt(self, index: int) -> Prompt:
        """Training task number `index` >= 0, without end; the same for the same (seed, index)."""

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out tasks; the same for every seed, none of them ever a training task.

        Raises ConfigError if there are fewer.
        """

    def step(self, prompt: Prompt, responses: list[str]) -> Step:
        """React to the policy's responses so far, oldest first, at least one."""

    def close(self) -> None:
        """Release worker processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSetup:
    """What every environment is built with; a class of the user gets it as its first argument.

    >>> EnvironmentSetup(name="sums", seed=0).messages("2 + 2 =")
    [{'role': 'user', 'content': '2 + 2 ='}]
    """

    name: str
    seed: int
    max_turns: int = 1
    system_prompt: str | None = None
    prompt_template: str = "{prompt}"
    grader: Grader | None = None  # None: environment.reward.kind=task in an environment that scores for itself

    def messages(self, task: str) -> list[dict[str, str]]:
        """The chat messages that pose a task: system prompt, if any, and the templated text."""
        # Not str.format: other braces in a template, in LaTeX for example, are text.
        user = {"role": "user", "content": self.prompt_template.replace("{prompt}", task)}
        return [{"role": "system", "content": self.system_prompt}, user] if self.system_prompt else [user]

    def single_turn(self, prompt: Prompt, responses: list[str]) -> Step:
        """The step of every environment that asks once: grade the response."""
        assert self.grader is not None, "single-turn environments are built with a grader"
        return Step(done=True, messages=[], grade=self.grader.grade(responses[-1], prompt))

    def close(self) -> None:
        """Close the grader, if there is one."""
        if self.grader:
            self.grader.close()


def is_held_out(question: str) -> bool:
    """Whether a question of a procedural task belongs to the held-out quarter.

    Decided by the text alone (a hash of it), so training and held-out tasks are disjoint for every seed, order and
    count, and nothing has to be remembered. Text that differs only in white space is the same question.
    """
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def derived_seed(*parts: object) -> int:
    """A 31-bit seed from anything printable.

    Procedural tasks seed item i with seed + i, so that streams of neighbouring seeds would be one stream, shifted.
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
