"""The config of a resumed run: the run's own, with what the command line sets on top."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from orbit_cli.config.compose import compose_layers
from orbit_cli.config.locate import GROUPS
from orbit_cli.config.overrides import COMMAND_LINE
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.serialize import from_plain, read_yaml, to_plain
from orbit_cli.errors import ConfigError


def resumed_config(overrides: list[str], run: str) -> OrbitConfig:
    """Config for `orbit train run.resume=RUN KEY=VALUE ...`: config.yaml of the run, then the overrides.

    Raises ConfigError for a group or recipe among the overrides: these would silently replace the run's own choices.
    """
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in GROUPS or key in ("recipe", "recipes"):
            raise ConfigError(
                f"{override} beside run.resume={run}: a resumed run keeps its own groups and recipe; set single keys, "
                "for example trainer.steps=60, or start a new run"
            )
    layers = compose_layers(overrides).layers
    given = next(layer.values for layer in layers if layer.source == COMMAND_LINE)
    folder = Path(run).expanduser()
    merged = OmegaConf.create(to_plain(read_yaml(folder / "config.yaml")))
    for path, value in given.items():
        OmegaConf.update(merged, path, value)
    plain = OmegaConf.to_container(merged)
    assert isinstance(plain, dict)
    return from_plain(plain, f"run.resume={run}")
