r"""Scorer of mathematical answers by math-verify: is the last \boxed{...} equal to the reference answer?

Two boxes would be parsed into a set that equals neither, so the last one is cut out first. math-verify's own timeouts
use signal.alarm, which fails off the main thread; they are switched off, and the worker process is killed instead.
"""

from __future__ import annotations

import logging
from typing import Any

from orbit_cli.config.schema.learning import RewardConfig
from orbit_cli.rewards.extraction import last_boxed, last_group
from orbit_cli.rewards.score import Score, Scorer, reference_answer
from orbit_cli.rewards.text_match import compile_field
from orbit_cli.types import Prompt


def math_scorer(config: RewardConfig) -> Scorer:
    r"""1 if the answers are mathematically equal, else 0; a response without a box scores 0.

    With `extract`, its last match is graded (the last box in it, if it has one). Raises ValueError where the reference
    answer cannot be parsed.
    """
    from math_verify import (
        parse,
        verify,
    )  # sympy: seconds to import, so only where it is used, and before the first grade

    extract = compile_field(config.extract, "environment.reward.extract") if config.extract else None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its timeouts are off

    def parse_boxed(expression: str) -> list[Any]:
        return parse(f"\\boxed{{{expression}}}", parsing_timeout=None)

    def score(response: str, prompt: Prompt) -> Score:
        text = last_group(extract, response) if extract else response
        boxed = None if text is None else last_boxed(text)
        candidate = text if boxed is None and extract else boxed
        reference = reference_answer(prompt)
        gold = parse_boxed(last_boxed(reference) or reference)
        if not gold:
            raise ValueError(f"the answer {reference!r} of prompt {prompt.id} cannot be parsed as mathematics")
        parsed = [] if candidate is None else parse_boxed(candidate)
        if not parsed:
            return Score(0.0, candidate)
        equal = verify(gold, parsed, timeout_seconds=None, raise_on_error=True)
        return Score(float(equal), str(parsed[0]))

    return score
