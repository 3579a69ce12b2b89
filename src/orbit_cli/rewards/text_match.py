"""Scorers that compare text: equality with the answer, and a regular expression over the whole response."""

from __future__ import annotations

import re

from orbit_cli.config.schema.learning import RewardConfig
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.extraction import last_group
from orbit_cli.rewards.score import Score, Scorer, reference_answer
from orbit_cli.types import Prompt


def compile_field(pattern: str, config_field: str) -> re.Pattern[str]:
    """Compile an expression of the config. Raises ConfigError with the place of the mistake."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{config_field}={pattern!r} is no regular expression: {error}; correct it") from error


def exact_scorer(config: RewardConfig) -> Scorer:
    """1 if the stripped response (or what `extract` finds in it) equals the stripped answer, else 0."""
    extract = compile_field(config.extract, "environment.reward.extract") if config.extract else None

    def score(response: str, prompt: Prompt) -> Score:
        answer = last_group(extract, response) if extract else response.strip()
        return Score(float(answer == reference_answer(prompt).strip()), answer)

    return score


def regex_scorer(config: RewardConfig) -> Scorer:
    """1 if `pattern` matches the whole stripped response and its first group, where it has one, equals the answer."""
    if not config.pattern:
        raise ConfigError("environment.reward.kind=regex needs environment.reward.pattern, for example '(\\d+)'")
    pattern = compile_field(config.pattern, "environment.reward.pattern")
    extract = compile_field(config.extract, "environment.reward.extract") if config.extract else None

    def score(response: str, prompt: Prompt) -> Score:
        text = last_group(extract, response) if extract else response.strip()
        match = None if text is None else pattern.fullmatch(text)
        if match is None:
            return Score(0.0, None)
        if not pattern.groups:
            return Score(1.0, match.group(0))
        answer = (match.group(1) or "").strip()
        return Score(float(answer == reference_answer(prompt).strip()), answer)

    return score
