"""What a person typed that no command takes (a misspelt command, an option's value, a missing argument), as a sentence.

Typer answers these with its usage text; here they read like every other mistake: what was set, and what is accepted.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

_CHOICE = re.compile(r"(?:Value error, )?'(?P<value>.*)' is not one of (?P<choices>.*?)\.?")


def usage_sentence(error: typer.TyperException) -> str:
    """The sentence for an exception of Typer's own.

    >>> usage_sentence(typer.TyperException("Got unexpected extra argument (x)"))
    'Got unexpected extra argument (x); `orbit --help` shows what it takes'
    """
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    command = context.command if context is not None else None
    called = f"orbit {context.info_name}" if context is not None and context.parent is not None else "orbit"
    kind, message = type(error).__name__, error.message.rstrip(".")
    if kind == "MissingParameter" and param is not None:
        return f"{called} needs {param.name.upper()}: {_help(param)}{_example(called, command)}"
    chosen = _CHOICE.fullmatch(message)
    if chosen and param is not None:
        choices = re.findall(r"'([^']*)'", chosen["choices"])
        option = param.opts[0]
        return f"{option}={chosen['value']} is unknown; {option} is one of {', '.join(choices)}" + _near(
            chosen["value"], choices
        )
    missing = re.fullmatch(r"No such command '(?P<name>.*)'", message)
    if missing and command is not None:
        names = list(getattr(command, "commands", {}))
        return f"there is no command {missing['name']}; commands are {', '.join(names)}{_near(missing['name'], names)}"
    option = getattr(error, "option_name", None)
    if kind == "NoSuchOption" and option and command is not None:
        options = [name for one in command.params for name in one.opts if name.startswith("--")] + ["--help"]
        what = f"options are {', '.join(options)}{_near(option, options)}"
        return f"{called} has no option {option}; {what}; settings are written key=value, without dashes"
    return f"{message}; `{called} --help` shows what it takes"


def _help(param: object) -> str:
    text = (getattr(param, "help", None) or "an argument").strip().rstrip(".")
    return text[0].lower() + text[1:] if text[1:2].islower() else text


def _example(called: str, command: object) -> str:
    """The first example in the command's help."""
    lines = [line.strip() for line in (getattr(command, "help", None) or "").splitlines()]
    example = next((line for line in lines if line.startswith(f"{called} ")), None)
    return f"; for example `{example}`" if example else f"; `{called} --help` shows what it takes"


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]}?" if near else ""
