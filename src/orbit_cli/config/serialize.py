"""A typed config as plain data and back: for the run folder's config.yaml, for W&B and for comparing two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orbit_cli.config.checks import check_value
from orbit_cli.config.compose import flatten, to_typed
from orbit_cli.config.fields import FIELDS, REQUIRED
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import ConfigError

SECTIONS = tuple(path for path, field in FIELDS.items() if "." not in path and field.default is REQUIRED)
RESTORE = "restore the file (a report.html beside it shows its text) or start a new run"


def to_plain(config: OrbitConfig) -> dict[str, Any]:
    """Nested dict of str, int, float, bool, None, list and dict; enums become their names."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return plain


def from_plain(plain: dict[str, Any], where: str) -> OrbitConfig:
    """The inverse of `to_plain`. Raises ConfigError naming `where` for keys or values that do not fit the schema."""
    for path, value in flatten(plain, "").items():
        check_value(path, value, where)
    try:
        return to_typed(OmegaConf.merge(OmegaConf.structured(OrbitConfig), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error


def to_yaml(config: OrbitConfig) -> str:
    """YAML in which text that looks like a number (`2E3`) stays text when OmegaConf reads it again."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def read_yaml(path: Path) -> OrbitConfig:
    """Read what `to_yaml` wrote. Raises ConfigError if the file is missing, unreadable or of another schema."""
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist, so this is no run folder; give the folder of a run") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {str(error).splitlines()[0]}; {RESTORE}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no mapping of config keys; {RESTORE}")
    lost = [name for name in SECTIONS if not isinstance(plain.get(name), dict)]
    if lost:
        raise ConfigError(f"{path} is damaged, it has no {', '.join(lost)}; {RESTORE}")
    return from_plain(plain, str(path))
