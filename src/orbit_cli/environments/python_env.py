"""Environments written by the user: a class by its import path.

The class is called as `Class(setup, **environment.params)` with an `EnvironmentSetup` and must have the members of
`protocol.Environment`; `guess_number.py` is an example.
"""

from __future__ import annotations

import inspect
from typing import Any

from orbit_cli.environments.protocol import Environment, EnvironmentSetup
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.import_path import load_object

MEMBERS = ("name", "max_turns", "train_prompt", "eval_prompts", "step", "close")


def load_environment(setup: EnvironmentSetup, target: str, params: dict[str, Any]) -> Environment:
    """Build the user's environment.

    Raises:
        ConfigError: it cannot be imported, does not accept the parameters, or lacks a member of the protocol.
    """
    cls = load_object(target, "environment.target")
    if not callable(cls):
        raise ConfigError(f"environment.target={target} is no class but a {type(cls).__name__}; name a class")
    signature = inspect.signature(cls)
    try:
        signature.bind(setup, **params)
    except TypeError as error:
        accepted = [name for name in list(signature.parameters)[1:]]
        raise ConfigError(
            f"environment.params does not fit {target}: {error}; it takes {', '.join(accepted) or 'no parameters'}"
        ) from error
    environment = cls(setup, **params)
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        raise ConfigError(f"environment.target={target} is no environment: it lacks {', '.join(missing)}; add them")
    return environment
