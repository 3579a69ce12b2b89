"""Scorer by a function of the user: `module:function`, called as function(response, prompt), returning a number."""

from __future__ import annotations

from orbit_cli.config.schema.learning import RewardConfig
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.extraction import last_group
from orbit_cli.rewards.import_path import load_object
from orbit_cli.rewards.score import Score, Scorer
from orbit_cli.rewards.text_match import compile_field
from orbit_cli.types import Prompt


def python_scorer(config: RewardConfig) -> Scorer:
    """What the function returns, as a float. With `extract` it is given the last match; without a match the score is 0.

    It runs in a worker process (`pool.py`): it must not rely on state shared with the run or between calls.
    """
    if not config.function:
        raise ConfigError("environment.reward.kind=python needs environment.reward.function=module:function")
    function = load_object(config.function, "environment.reward.function")
    if not callable(function):
        raise ConfigError(f"environment.reward.function={config.function} is a {type(function).__name__}, no function")
    extract = compile_field(config.extract, "environment.reward.extract") if config.extract else None

    def score(response: str, prompt: Prompt) -> Score:
        text = last_group(extract, response) if extract else response.strip()
        if text is None:
            return Score(0.0, None)
        value = function(text, prompt)
        if value is None:
            raise TypeError(f"{config.function} returned None; it must return a number")
        return Score(float(value), text)

    return score
