"""What all commands share: overrides as the trailing argument, `--cfg job`, and completion of both."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from orbit_cli.config.locate import GROUPS, group_options, recipe_names

if TYPE_CHECKING:
    from orbit_cli.config.schema import OrbitConfig


class Show(StrEnum):
    """What --cfg prints."""

    job = "job"


def complete_override(incomplete: str) -> list[str]:
    """Completions of one override: groups and their options, recipes, and keys of the schema."""
    key, equals, _ = incomplete.partition("=")
    if equals and key in GROUPS:
        candidates = [f"{key}={option}" for option in group_options(key)]
    elif equals and key == "recipe":
        candidates = [f"recipe={name}" for name in recipe_names()]
    else:
        from orbit_cli.config.fields import FIELDS  # only here: 30 ms that --help need not pay

        leaves = {path: field for path, field in FIELDS.items() if not field.is_section}
        candidates = [f"{group}=" for group in (*GROUPS, "recipe")]
        candidates += [f"{path}={choice}" for path, field in leaves.items() for choice in field.choices or ("",)]
    return [candidate for candidate in candidates if candidate.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides of the config, and recipe=NAME.",
        show_default=False,
        autocompletion=complete_override,
    ),
]
Cfg = Annotated[
    Show | None,
    typer.Option("--cfg", help="Print the composed config as YAML and stop.", show_default=False),
]


def load_config(overrides: list[str] | None, cfg: Show | None) -> OrbitConfig:
    """Compose and check the config; with --cfg print it and end the command. Raises ConfigError."""
    from orbit_cli.config.compose import compose

    return _shown(compose(overrides or []), cfg)


def load_served_config(
    overrides: list[str] | None, cfg: Show | None, *, note: bool = True
) -> tuple[OrbitConfig, list[str] | None]:
    """As `load_config`, where run.adapter may name a run: then what it was trained on comes from its config.yaml.

    Second comes what preflight is to call the overrides: None where they do not say all. `note` prints a line on it.
    """
    from orbit_cli.config.adapter_run import compose_served
    from orbit_cli.config.compose import to_typed

    served = compose_served(overrides or [])
    config = _shown(to_typed(served.composition.raw), cfg)
    served.check(config)
    said = served.note(config) if note else None
    if said:
        print(said, flush=True)
    return config, None if served.adds else overrides or []


def _shown(config: OrbitConfig, cfg: Show | None) -> OrbitConfig:
    """The config, or with --cfg its YAML and the end of the command."""
    if cfg is not None:
        from orbit_cli.config.serialize import to_yaml

        print(to_yaml(config), end="")
        raise typer.Exit
    return config
