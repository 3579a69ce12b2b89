"""What a scorer is: a function of a response and its prompt that returns a number and the answer it looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orbit_cli.types import Prompt


@dataclass(frozen=True, slots=True)
class Score:
    """Result of a scorer that worked. A scorer that cannot tell raises; it never returns 0 for that."""

    value: float
    answer: str | None  # what was extracted from the response; equal answers are equal strings (maj@k)


class GradeFailure(Exception):
    """Why a response could not be graded, as a whole sentence or the exception of the scorer."""


Scorer = Callable[[str, Prompt], Score]


def reference_answer(prompt: Prompt) -> str:
    """The prompt's answer. Raises ValueError if it has none: then nothing can be right or wrong."""
    if prompt.answer is None:
        raise ValueError(f"prompt {prompt.id} has no answer to compare with")
    return prompt.answer
