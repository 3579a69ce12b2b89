"""The manual of one config key: the string under the field, its type, default, choices, and who sets it now."""

from __future__ import annotations

import textwrap

from orbit_cli.config.checks import suggestion
from orbit_cli.config.compose import compose_layers
from orbit_cli.config.fields import FIELDS, REQUIRED, Field, field_at
from orbit_cli.config.locate import GROUPS, group_options
from orbit_cli.config.provenance import provenance
from orbit_cli.errors import ConfigError


def explain(key: str) -> str:
    """Text about a key or section, for example explain("adapter.block_size"). Raises ConfigError if there is none."""
    if key in GROUPS and key not in FIELDS:  # experiment sets values of other sections
        return f"{key}: a config group; {key}=NAME with {', '.join(group_options(key))}"
    field = field_at(key)
    if field is None:
        leaf = [path for path in FIELDS if path.rpartition(".")[2] == key]
        hint = f"; did you mean {leaf[0]}?" if leaf else suggestion(key, FIELDS)
        raise ConfigError(f"there is no key {key}{hint}")
    return _section(field) if field.is_section else _leaf(field)


def _leaf(field: Field) -> str:
    lines = [field.path, *textwrap.wrap(field.manual, 100, initial_indent="  ", subsequent_indent="  ")]
    lines.append(f"  type     {field.type_name}")
    if field.default is REQUIRED:
        lines.append("  default  none: a config group or a recipe sets it")
    else:
        lines.append(f"  default  {_shown(field.default)}")
    value, source = provenance(compose_layers([])).get(field.path, (None, ""))
    if source:
        lines.append(f"  now      {_shown(value)}, from {source} when nothing is overridden")
    return "\n".join(lines)


def _section(field: Field) -> str:
    inside = [f for f in FIELDS.values() if f.path.rpartition(".")[0] == field.path]
    lines = [f"{field.path}: {field.manual}"]
    if field.path in GROUPS:
        lines.append(f"  group    {field.path}=NAME with {', '.join(group_options(field.path))}")
    width = max(len(f.path) for f in inside)
    lines += [f"  {f.path:<{width}}  {f.manual.partition('.')[0].splitlines()[0]}" for f in inside]
    return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "''"
