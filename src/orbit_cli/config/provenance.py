"""Where each value of a composed config came from: schema default, a file of conf/, a recipe, the run whose
adapter is served, or the command line.

A later layer wins, as in Hydra; the table shows who won.
"""

from __future__ import annotations

import io
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from orbit_cli.config.adapter_run import compose_served
from orbit_cli.config.compose import Composition, flatten

SCHEMA = "schema default"


def provenance(composition: Composition) -> dict[str, tuple[Any, str]]:
    """key -> (value, source) for every leaf of the composed config, in the schema's order."""
    sources = {path: layer.source for layer in composition.layers for path in layer.values}
    plain = OmegaConf.to_container(composition.raw, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    return {path: (value, _source(path, sources)) for path, value in flatten(plain, "").items()}


def _source(path: str, sources: dict[str, str]) -> str:
    """The source of a key; a key below a mapping that was set as a whole has the mapping's."""
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return SCHEMA


def provenance_table(overrides: list[str]) -> str:
    """The table that `orbit config` prints. Raises ConfigError as composing does."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for title in ("key", "value", "from"):
        table.add_column(title, overflow="fold")
    for path, (value, source) in provenance(compose_served(overrides).composition).items():
        table.add_row(path, _show(value), source)
    text = io.StringIO()
    # Plain text wide enough for any value, so that the table can be searched and cut by other programs.
    Console(file=text, width=220, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value if value and value.strip() == value and "\n" not in value else repr(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    return str(value)
