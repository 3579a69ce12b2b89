"""The schema as a flat table: every config key with its type, default, choices and manual.

Read from the dataclasses by reflection, and from their source (with ast) for the strings under the fields. Values are
judged in checks.py, composing is in compose.py.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import types
import typing
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from orbit_cli.config.schema.root import OrbitConfig

REQUIRED = object()  # the default of a field that has none


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One config key.

    >>> FIELDS["adapter.kind"].choices
    ('oft', 'lora')
    """

    path: str  # "adapter.block_size"
    type: type  # int, float, bool, str, list, dict, a StrEnum, or a dataclass for a section
    element: type | None  # of a list
    optional: bool  # null is accepted
    default: Any  # REQUIRED if there is none
    manual: str  # the string under the field

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(member.value for member in self.type) if issubclass(self.type, StrEnum) else ()

    @property
    def type_name(self) -> str:
        names = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}
        if self.is_section:
            return "section"
        if self.choices:
            name = "one of " + ", ".join(self.choices)
        elif self.type is list:
            name = f"list of {names.get(self.element, 'value')}s"
        else:
            name = names[self.type]
        return f"{name}, or null" if self.optional else name


def _unwrap(hint: Any) -> tuple[type, type | None, bool]:
    """Type hint -> (type, list element, accepts null)."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        assert len(inner) == 1, f"the schema has a union {hint}, which OmegaConf cannot type"
        hint, optional = inner[0], True
    origin = typing.get_origin(hint)
    if origin is list:
        return list, typing.get_args(hint)[0], optional
    return (origin or hint), None, optional


@cache
def _manuals(module_name: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal that follows the field in the source."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module_name)))
    found = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, cls.body[1:], strict=False):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if is_field and is_string and isinstance(after.value.value, str):
                found[cls.name, field.target.id] = inspect.cleandoc(after.value.value)
    return found


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _walk(cls: type, prefix: str) -> typing.Iterator[Field]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, element, optional = _unwrap(hints[field.name])
        path = prefix + field.name
        yield Field(
            path=path,
            type=kind,
            element=element,
            optional=optional,
            default=_default(field),
            manual=_manuals(cls.__module__).get((cls.__name__, field.name), ""),
        )
        if dataclasses.is_dataclass(kind):
            yield from _walk(kind, path + ".")


FIELDS: dict[str, Field] = {field.path: field for field in _walk(OrbitConfig, "")}


def field_at(path: str) -> Field | None:
    """The field of a key. A key below a mapping (`model.architecture.hidden_size`) belongs to the mapping."""
    if path in FIELDS:
        return FIELDS[path]
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        parent = FIELDS.get(".".join(parts[:end]))
        if parent is not None:
            return parent if parent.type is dict else None
    return None
