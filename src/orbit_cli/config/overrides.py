"""Command-line overrides, read and judged before Hydra sees them.

Each becomes an Override in Hydra's own grammar: `recipe=NAME` turns into Hydra's `+recipes=NAME`, keys and values are
checked against the schema (checks.py), text that looks like a number is quoted so that it stays text, and keys below a
free mapping get `++`. Overrides of Hydra itself (`hydra/launcher=...`) pass through.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, Sweep
from hydra.errors import HydraException

from orbit_cli.config.checks import check_key, check_value, suggestion
from orbit_cli.config.fields import Field, field_at
from orbit_cli.config.locate import GROUPS, data_root, group_options, recipe_names
from orbit_cli.errors import ConfigError

COMMAND_LINE = "command line"
_RECIPE = re.compile(r"^\+*recipes?=(?P<names>.*)$", re.DOTALL)
_NAME = re.compile(r"[0-9a-zA-Z_]+")
_PLAIN = re.compile(r"[\w.+\-]+")  # one word of the grammar: no quotes, brackets or spaces


@dataclass(kw_only=True, slots=True)
class Request:
    """What the command line asked for, in Hydra's terms."""

    overrides: list[str] = field(default_factory=list)  # checked, in the order given
    search_path: list[Path] = field(default_factory=list)  # folders that hold recipe folders
    recipe: str | None = None  # as the person wrote it
    values: dict[str, Any] = field(default_factory=dict)  # key -> value set on the command line, sweeps left out


def read_overrides(arguments: list[str], *, sweep: bool = False) -> Request:
    """Check and translate overrides. `sweep` allows several values per key. Raises ConfigError."""
    request = Request(search_path=[data_root()])
    parser = OverridesParser.create()
    for argument in arguments:
        recipe = _RECIPE.match(argument)
        if recipe:
            _add_recipe(request, recipe["names"], sweep)
        else:
            _add_override(request, argument, parser, sweep)
    return request


def _add_recipe(request: Request, names: str, sweep: bool) -> None:
    if request.recipe is not None:
        raise ConfigError(f"recipe={request.recipe} and recipe={names}: a run has one recipe; keep one of them")
    request.recipe = names
    if names.endswith((".yaml", ".yml")):
        path = Path(names).expanduser().resolve()
        if not path.is_file():
            raise ConfigError(f"recipe={names}: there is no such file; give a path to a .yaml file or a recipe's name")
        if path.parent.name in (*GROUPS, "hydra") or not (
            _NAME.fullmatch(path.parent.name) and _NAME.fullmatch(path.stem)
        ):
            better = re.sub(r"[^0-9a-zA-Z_]", "_", path.stem)
            raise ConfigError(
                f"recipe={names}: a recipe is FOLDER/NAME.yaml, both made of letters, digits and _, and FOLDER is no "
                f"config group; move it, for example to recipes/{better}.yaml"
            )
        request.search_path.append(path.parent.parent)
        request.overrides.append(f"+{path.parent.name}={path.stem}")
        return
    chosen = names.split(",") if sweep else [names]
    for name in chosen:
        if name not in recipe_names():
            raise ConfigError(
                f"recipe={name} is unknown; recipes are {', '.join(recipe_names())}{suggestion(name, recipe_names())}"
            )
    request.overrides.append(f"+recipes={names}")


def _add_override(request: Request, argument: str, parser: OverridesParser, sweep: bool) -> None:
    try:
        override = parser.parse_override(argument)
    except HydraException as error:  # OverrideParseException, or its parent for a missing =
        if "=" not in argument:
            raise ConfigError(f"{argument}: an override is written key=value, for example trainer.steps=50") from error
        raise ConfigError(
            f"{argument}: this value cannot be read; put it in quotes, for example "
            f"\"{argument.partition('=')[0]}='...'\""
        ) from error
    key = override.key_or_group
    if key.startswith(("hydra.", "hydra/")) or key == "hydra":
        request.overrides.append(argument)
        return
    if override.is_sweep_override() and not sweep:
        found = field_at(key)
        as_list = f", or write {key}=[...] for a list" if found is not None and found.type is list else ""
        as_text = f", or quote the whole value for a text with a comma: \"{key}='...'\"" if _is_text(found) else ""
        raise ConfigError(f"{argument} gives several values: add -m for one run each{as_list}{as_text}")
    if key in GROUPS:
        _check_group(override)
        request.overrides.append(argument)
        return
    _add_value(request, override, parser)


def _check_group(override: Override) -> None:
    group, options = override.key_or_group, group_options(override.key_or_group)
    if override.type is OverrideType.DEL and group == "experiment":
        return
    for option in _elements(override):
        if option is None:
            raise ConfigError(f"{group}=null leaves a run without {group}; {group} is one of {', '.join(options)}")
        if isinstance(option, dict) or option not in options:
            raise ConfigError(
                f"{group}={option} is unknown; {group} is one of {', '.join(options)}{suggestion(str(option), options)}"
            )


def _add_value(request: Request, override: Override, parser: OverridesParser) -> None:
    key, line = override.key_or_group, override.input_line or ""
    if "/" in key or override.package:
        raise ConfigError(f"{line}: {key} is no config group; groups are {', '.join(GROUPS)}{suggestion(key, GROUPS)}")
    if "." not in key and suggestion(key, GROUPS) and field_at(key) is None:
        raise ConfigError(f"{line}: there is no key or group {key}{suggestion(key, GROUPS)}")
    schema_field = check_key(key, COMMAND_LINE)
    if override.type is OverrideType.DEL:
        if schema_field.path == key:
            raise ConfigError(f"{line}: {key} is part of every config and cannot be removed; set it to another value")
        request.overrides.append(line)
        return
    text = line.partition("=")[2]
    if schema_field.path == key:
        text = _keep_text(schema_field, text, parser)
        override = parser.parse_override(f"{key}={text}")
    for value in _elements(override):
        check_value(key, value, COMMAND_LINE)
    if not override.is_sweep_override():
        request.values[key] = override.value()
    free_mapping = schema_field.path != key or schema_field.type is dict  # holds keys that the schema does not know
    request.overrides.append(f"{'++' if free_mapping else ''}{key}={text}")


def _is_text(found: Field | None) -> bool:
    return found is not None and found.type is str


def _elements(override: Override) -> list[Any]:
    """The value, or each value of a comma-separated sweep; ranges and globs are left to Hydra."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [_unquoted(item) for item in value.list]
    return [] if isinstance(value, Sweep) or override.is_sweep_override() else [value]


def _unquoted(item: Any) -> Any:
    """One value of a sweep without the parser's own type for quoted text, also inside lists and mappings."""
    if isinstance(item, list):
        return [_unquoted(inner) for inner in item]
    if isinstance(item, dict):
        return {_unquoted(key): _unquoted(inner) for key, inner in item.items()}
    return getattr(item, "text", item)


def _keep_text(schema_field: Field, text: str, parser: OverridesParser) -> str:
    """Quote what a text field would lose: `2E3` is a number to the grammar, and would come back as `2000.0`."""
    inside = text[1:-1] if schema_field.element is str and text.startswith("[") and text.endswith("]") else text
    if schema_field.type is not str and inside is text:
        return text
    words = [word.strip() for word in inside.split(",")]
    if not all(_PLAIN.fullmatch(word) for word in words):
        return text
    kept = ",".join(_quoted_if_needed(word, parser) for word in words)
    return kept if inside is text else f"[{kept}]"


def _quoted_if_needed(word: str, parser: OverridesParser) -> str:
    value = parser.parse_override(f"x={word}").value()
    return word if isinstance(value, str) or value is None else f"'{word}'"


def combinations(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """(what differs, all overrides) of every combination of comma-separated values, in the order of Hydra's sweeper.

    Raises ConfigError for a mistake in any value.
    """
    read_overrides(arguments, sweep=True)
    parser = OverridesParser.create()
    choices: list[list[str]] = []
    for argument in arguments:
        recipe = _RECIPE.match(argument)
        if recipe:
            choices.append([f"recipe={name}" for name in recipe["names"].split(",")])
            continue
        override = parser.parse_override(argument)
        key = argument.partition("=")[0]
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        spelt = {"True": "true", "False": "false"} if set(map(type, _elements(override))) == {bool} else {}
        choices.append([f"{key}={spelt.get(value, value)}" for value in values] or [argument])
    found = []
    for chosen in itertools.product(*choices):
        own = [text for text, options in zip(chosen, choices, strict=True) if len(options) > 1]
        found.append((" ".join(own or chosen), list(chosen)))
    return found
