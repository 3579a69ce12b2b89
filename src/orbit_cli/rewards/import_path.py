"""Loading an object by its import path, module:name, with errors that name the config field."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from orbit_cli.errors import ConfigError


def load_object(path: str, config_field: str) -> Any:
    """The object at `module:name`.

    Raises:
        ConfigError: the path has another form, the module cannot be imported, or it has no such name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{config_field}={path} is no import path; write module:name, for example my_task:score")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise ConfigError(
            f"{config_field}={path}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "check the name, and that its folder is on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        public = [n for n in dir(module) if not n.startswith("_")]
        nearest = difflib.get_close_matches(name, public, n=3) or public[:8]
        there = ", ".join(nearest) or "nothing"
        raise ConfigError(f"{config_field}={path}: {module_name} has no {name}; it has {there}")
    return getattr(module, name)
