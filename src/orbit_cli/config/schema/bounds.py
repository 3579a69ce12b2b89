"""Bounds of numbers, as sentences: what is set, and what it must be. null passes everywhere."""

from __future__ import annotations

import re

from orbit_cli.errors import ConfigError


def at_least(section: object, path: str, least: float, *names: str) -> None:
    """Refuse values below `least`. Raises ConfigError."""
    for name, value in _set(section, names):
        if value < least:
            raise ConfigError(f"{path}.{name}={value} must be at least {least}; set {least} or more")


def at_most(section: object, path: str, **most: int) -> None:
    """Refuse values beyond what a run could ever end with. Raises ConfigError."""
    for name, value in _set(section, tuple(most)):
        if value > most[name]:
            raise ConfigError(f"{path}.{name}={value} is more than any run ends with; set at most {most[name]}")


def positive(section: object, path: str, **examples: float) -> None:
    """Refuse 0 and less; each field with an example of what to set. Raises ConfigError."""
    for name, value in _set(section, tuple(examples)):
        if value <= 0:
            raise ConfigError(f"{path}.{name}={value} must be positive, for example {examples[name]:g}")


def share(section: object, path: str, *names: str, below_one: bool = False) -> None:
    """Refuse what is no share from 0 to 1 (1 itself with `below_one`). Raises ConfigError."""
    for name, value in _set(section, names):
        if not 0 <= value <= 1 or (below_one and value == 1):
            end = ", below 1; set for example 0.9" if below_one else "; set for example 0.5"
            raise ConfigError(f"{path}.{name}={value} must lie between 0 and 1{end}")


def truncation(section: object, path: str) -> None:
    """top_p in (0, 1] and top_k of -1 (all) or at least 1. Raises ConfigError."""
    if not 0 < section.top_p <= 1:
        raise ConfigError(f"{path}.top_p={section.top_p} must be above 0 and at most 1; set 1 for all tokens")
    if section.top_k != -1 and section.top_k < 1:
        raise ConfigError(f"{path}.top_k={section.top_k} must be at least 1, or -1 for all tokens; set -1 or 1 or more")


def distinct(section: object, path: str, *names: str) -> None:
    """Refuse lists that name something twice. Raises ConfigError."""
    for name, values in _set(section, names):
        twice = [value for index, value in enumerate(values) if value in values[:index]]
        if twice:
            raise ConfigError(f"{path}.{name} names {twice[0]} twice; name it once")


def expressions(section: object, path: str, *names: str) -> None:
    """Refuse entries re:REGEX that are no regular expressions. Raises ConfigError."""
    for name, values in _set(section, names):
        for value in values:
            try:
                re.compile(value.removeprefix("re:") if value.startswith("re:") else "")
            except re.error as error:
                raise ConfigError(f"{path}.{name} has {value!r}, no regular expression ({error}); mend it") from error


def _set(section: object, names: tuple[str, ...]) -> list[tuple[str, object]]:
    return [(name, getattr(section, name)) for name in names if getattr(section, name) is not None]
