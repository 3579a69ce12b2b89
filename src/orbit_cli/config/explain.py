"""The manual of one config key: the string under the field, its type, default, choices, and who sets it now."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import yaml
from omegaconf import OmegaConf

from orbit_cli.config.adapter_run import compose_served
from orbit_cli.config.checks import suggestion
from orbit_cli.config.fields import FIELDS, REQUIRED, Field, field_at
from orbit_cli.config.locate import GROUPS, conf_dir, group_options, recipe_names
from orbit_cli.config.provenance import provenance
from orbit_cli.errors import ConfigError

WIDTH = 100


def explain(key: str, overrides: Sequence[str] = ()) -> str:
    """Text about a key or section, for example explain("adapter.block_size"), and its value under `overrides`.

    Raises ConfigError if there is none, or for overrides that cannot be composed.
    """
    if key in GROUPS and key not in FIELDS:  # experiment sets values of other sections
        return f"{key}: a config group; {key}=NAME with {_options(key)}"
    if key == "recipe":
        return f"recipe: a file of overrides; recipe=NAME with {', '.join(recipe_names())}, or recipe=PATH.yaml"
    field = field_at(key)
    if field is None:
        raise ConfigError(f"there is no key {key}{_hint(key)}")
    return _section(field) if field.is_section else _leaf(field, overrides)


def _leaf(field: Field, overrides: Sequence[str]) -> str:
    lines = [field.path, *textwrap.wrap(field.manual, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines.append(f"  type     {field.type_name}")
    if field.default is REQUIRED:
        lines.append("  default  none: a config group or a recipe sets it")
    else:
        lines.append(f"  default  {_shown(field.default)}")
    composition = compose_served(list(overrides)).composition
    value, source = provenance(composition).get(field.path, (None, ""))
    if source:
        under = f"with {' '.join(overrides)}" if overrides else "when nothing is overridden"
        shown = _shown(value)
        if shown.startswith("${"):  # what it stands for, and how it is written
            shown = f"{_shown(OmegaConf.select(composition.raw, field.path))} ({shown})"
        lines.append(f"  now      {shown}, from {source} {under}")
    return "\n".join(lines)


def _section(field: Field) -> str:
    inside = [f for f in FIELDS.values() if f.path.rpartition(".")[0] == field.path]
    lines = [f"{field.path}: {field.manual}"]
    if field.path in GROUPS:
        lines += _wrapped("  group    ", f"{field.path}=NAME with {_options(field.path)}")
    width = max(len(f.path) for f in inside)
    for one in inside:
        lines += _wrapped(f"  {one.path:<{width}}  ", _first_sentence(one.manual))
    return "\n".join(lines)


def _options(group: str) -> str:
    """The names of a group; of two for the same file the second says whose it is."""
    named = []
    for name in group_options(group):
        text = (conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
        values = yaml.safe_load(text) or {}
        same = values["defaults"] if list(values) == ["defaults"] and len(values["defaults"]) == 1 else []
        named.append(f"{name} (the same as {same[0]})" if same and isinstance(same[0], str) else name)
    return ", ".join(named)


def _hint(key: str) -> str:
    """What could be meant: a key of that name, a key that has it as a value, or the nearest spelling."""
    name = key.rpartition(".")[2]
    for path in FIELDS:
        if path.rpartition(".")[2] == key:
            return f"; did you mean {path}?"
    holders = [path for path, field in FIELDS.items() if name in field.choices]
    inside = [path for path in holders if path.partition(".")[0] == key.partition(".")[0]]
    if "." in key and inside:
        return f"; {name} is a value of {' and '.join(inside)}"
    return suggestion(key, FIELDS)


def _wrapped(start: str, text: str) -> list[str]:
    after = " " * len(start)
    return textwrap.wrap(text, WIDTH + 20, initial_indent=start, subsequent_indent=after, break_on_hyphens=False)


def _first_sentence(manual: str) -> str:
    """On one line; numbers of papers and keys have full stops too."""
    return re.split(r"\.(?=\s|$)", " ".join(manual.split()))[0]


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "''"
