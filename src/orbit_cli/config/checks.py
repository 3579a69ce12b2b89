"""One sentence for each bad key or value: what was set, what is accepted, the nearest valid name.

Judges single keys and values, from a file or the command line, before Hydra merges them; combinations of values are
judged by the schema's own __post_init__.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from orbit_cli.config.fields import FIELDS, Field, field_at
from orbit_cli.errors import ConfigError

LARGEST = 10**18  # no number here means anything beyond, and products of two such still count


def nearest(name: str, names: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return found[0] if found else None


def suggestion(name: str, names: Iterable[str]) -> str:
    found = nearest(name, names)
    return f"; did you mean {found}?" if found else ""


def unknown_key(path: str, where: str) -> ConfigError:
    """Error for a key that the schema does not have, naming the section's keys and the nearest of all."""
    if not path:
        return ConfigError(f"{where}: a key is missing before =; write key=value, for example trainer.steps=50")
    parent = path.rpartition(".")[0]
    while parent and not (parent in FIELDS and FIELDS[parent].is_section):
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    keys = [p.removeprefix(prefix) for p in FIELDS if p.startswith(prefix) and "." not in p.removeprefix(prefix)]
    near = nearest(path.removeprefix(prefix), keys)
    leaf = path.rpartition(".")[2]
    if near is None or difflib.SequenceMatcher(None, leaf, near).ratio() < 0.7:  # right name in the wrong section
        same = [p for p in FIELDS if p.rpartition(".")[2] == leaf] or [nearest(path, FIELDS) or ""]
        full = same[0] if same[0] != parent else ""  # its section is no answer
    else:
        full = prefix + near
    hint = f"; did you mean {full}?" if full else ""
    inside = f"{parent} has" if parent else "top-level keys are"
    return ConfigError(f"{where}: there is no key {path}; {inside} {', '.join(keys)}{hint}")


def check_key(path: str, where: str) -> Field:
    """The field of a key. Raises ConfigError if the schema has none."""
    field = field_at(path)
    if field is None:
        raise unknown_key(path, where)
    return field


def check_value(path: str, value: Any, where: str) -> None:
    """Raise ConfigError unless `value`, as YAML or the override grammar read it, fits the field at `path`."""
    field = check_key(path, where)
    if path != field.path or (isinstance(value, str) and ("${" in value or value == "???")):
        return  # below a free mapping, or decided when interpolated
    if value is None:
        if not field.optional:
            raise ConfigError(f"{where}: {path}=null, but a value is needed: {field.type_name}")
        return
    if field.is_section:
        raise ConfigError(
            f"{where}: {path}={value} sets a whole section; set one of its keys, for example "
            f"{next(p for p in FIELDS if p.startswith(path + '.'))}=..."
        )
    if field.choices:
        _check_choice(field, value, where)
    elif field.type is list:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {path}={value} must be a {field.type_name}, written as {path}=[a,b]")
        for item in value:
            _check_scalar(path, field.element, item, where, "each entry ")
    elif field.type is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {path}={value} must be a mapping, written as {path}={{key:value}}")
    else:
        _check_scalar(path, field.type, value, where, "")


def _check_choice(field: Field, value: Any, where: str) -> None:
    if isinstance(value, bool):  # YAML 1.1 reads off, no, on, yes as booleans
        raise ConfigError(
            f"{where}: {field.path}={str(value).lower()} is not accepted; it must be {field.type_name} "
            '(YAML reads a bare off or no as false: write "off")'
        )
    if str(value) not in field.choices:
        accepted = ", ".join(field.choices)
        hint = suggestion(str(value), field.choices)
        raise ConfigError(f"{where}: {field.path}={value} is unknown; accepted are {accepted}{hint}")


def _check_scalar(path: str, kind: type | None, value: Any, where: str, what: str) -> None:
    if kind is str and not isinstance(value, str):
        raise ConfigError(f"{where}: {what}{path}={value} must be text but reads as a {type(value).__name__}; quote it")
    if kind is bool and not _reads_as_bool(value):
        raise ConfigError(f"{where}: {what}{path}={value} must be true or false")
    if kind is int and not _reads_as_int(value):
        raise ConfigError(f"{where}: {what}{path}={value} must be a whole number of at most 18 digits")
    if kind is float and not _reads_as_float(value):
        raise ConfigError(f"{where}: {what}{path}={value} must be a number below 1e18, for example 1e-5")


def _reads_as_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"))


def _reads_as_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, str):  # 010 is text to Hydra's grammar
        return value.lstrip("+-").isdecimal() and len(value) < 20
    return isinstance(value, int) and abs(value) < LARGEST


def _reads_as_float(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return abs(number) < LARGEST  # false for what is no number, too
