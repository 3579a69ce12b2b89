"""Composes the one config of a run with Hydra's compose API, typed by the schema.

`compose(overrides)` is what commands call: typed dataclasses come out, and every mistake becomes one ConfigError
sentence. Overrides are read in overrides.py, single values judged in checks.py, combinations in the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from orbit_cli.config.checks import check_value, suggestion
from orbit_cli.config.fields import field_at
from orbit_cli.config.locate import conf_dir, data_root, group_options
from orbit_cli.config.overrides import COMMAND_LINE, Request, read_overrides
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import ConfigError

SCHEMA_NAME = "orbit_schema"  # first entry of conf/config.yaml's defaults
PRIMARY = "config"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The values that one file, or the command line, sets: `{"adapter.block_size": 32}`."""

    source: str  # "conf/adapter/oft.yaml", "recipes/main_job.yaml", "command line"
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """A composed config with the layers it was made of, lowest first."""

    raw: DictConfig
    layers: list[Layer]


def compose(overrides: list[str]) -> OrbitConfig:
    """Compose conf/, an optional recipe and overrides into the typed config.

    >>> compose(["recipe=smoke_dense_oft", "trainer.steps=3"]).trainer.steps
    3

    Raises ConfigError (exit code 2) with one sentence for anything misspelt, mistyped or contradictory.
    """
    return to_typed(compose_layers(overrides).raw)


def compose_raw(overrides: list[str]) -> DictConfig:
    """As `compose`, before the dataclasses are built: for printing. Raises ConfigError."""
    return compose_layers(overrides).raw


def compose_layers(overrides: list[str]) -> Composition:
    """As `compose_raw`, with the values of each file and of the command line. Raises ConfigError."""
    request = read_overrides(overrides)
    register_schema()
    given = [search_path_override(request.search_path), *request.overrides]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        try:
            layers = _file_layers(given)
            for layer in layers:
                for path, value in layer.values.items():
                    check_value(path, value, layer.source)
            raw = hydra.compose(PRIMARY, given)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise _sentence(error) from error
    return Composition(raw=raw, layers=[*layers, _command_line_layer(request)])


def to_typed(raw: DictConfig) -> OrbitConfig:
    """DictConfig -> dataclasses; the checks of the schema run here and raise ConfigError as they are."""
    try:
        typed = OmegaConf.to_object(raw)
    except MissingMandatoryValue as error:
        raise ConfigError(f"a required value is not set: {_first_line(error)}; choose a group that sets it") from error
    except OmegaConfBaseException as error:
        raise _sentence(error) from error
    assert isinstance(typed, OrbitConfig), "conf/config.yaml must list the schema first"
    return typed


def register_schema() -> None:
    """The schema, and `${at_least_one:${hardware.gpus}}`: the engine of a machine without GPUs is one process too."""
    OmegaConf.register_new_resolver("at_least_one", lambda number: max(number, 1), replace=True)
    ConfigStore.instance().store(name=SCHEMA_NAME, node=OrbitConfig)


def search_path_override(folders: list[Path]) -> str:
    """Where Hydra looks for recipe folders, besides conf/."""
    quoted = ",".join("'file://" + str(folder).replace("'", "\\'") + "'" for folder in folders)
    return f"hydra.searchpath=[{quoted}]"


def _file_layers(overrides: list[str]) -> list[Layer]:
    """The files of this composition in the order in which Hydra merges them.

    Uses the pinned Hydra's own defaults list, so that what is reported is what is merged.
    """
    loader = GlobalHydra.instance().config_loader()
    parsed, repository = loader._parse_overrides_and_create_caching_repo(PRIMARY, overrides)
    defaults = create_defaults_list(
        repo=repository, config_name=PRIMARY, overrides_list=parsed, prepend_hydra=False, skip_missing=False
    ).defaults
    layers = []
    for entry in defaults:
        if entry.config_path is None or entry.config_path == SCHEMA_NAME or entry.config_path.startswith("hydra"):
            continue
        loaded = repository.load_config(entry.config_path)
        if loaded is None:
            continue
        content = OmegaConf.to_container(loaded.config, resolve=False)
        if not isinstance(content, dict):
            raise ConfigError(f"{_display(loaded.path, entry.config_path)}: a config file must be a mapping of keys")
        content.pop("defaults", None)
        layers.append(
            Layer(source=_display(loaded.path, entry.config_path), values=flatten(content, entry.package or ""))
        )
    return layers


def _display(folder: str, config_path: str) -> str:
    """`file:///x/conf`, `adapter/oft` -> `conf/adapter/oft.yaml`; files of the person's own keep their full path."""
    name = config_path if config_path.endswith(".yaml") else f"{config_path}.yaml"
    path = Path(folder.removeprefix("file://")) / name
    return str(path.relative_to(data_root())) if path.is_relative_to(data_root()) else str(path)


def flatten(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Nested mapping -> dotted keys; a free mapping of the schema (model.architecture) is flattened too."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            flat |= flatten(value, path)
        elif not (isinstance(value, dict) and _is_section(path)):
            flat[path] = value
    return flat


def _is_section(path: str) -> bool:
    found = field_at(path)
    return found is not None and found.is_section


def _command_line_layer(request: Request) -> Layer:
    flat: dict[str, Any] = {}
    for path, value in request.values.items():
        flat |= flatten(value, path) if isinstance(value, dict) and value else {path: value}
    return Layer(source=COMMAND_LINE, values=flat)


def _sentence(error: Exception) -> ConfigError:
    """One sentence for what Hydra, OmegaConf or YAML refused after our own checks had passed it."""
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = group_options(group) if group else []
        accepted = f"; {group} is one of {', '.join(options)}{suggestion(option, options)}" if options else ""
        return ConfigError(f"a config file asks for {group}={option}, which does not exist{accepted}")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{mark.name}: line {mark.line + 1} is not valid YAML: {error.problem}")
    cause: BaseException = error
    while isinstance(cause, ConfigCompositionException) and cause.__cause__ is not None:
        cause = cause.__cause__
    full_key = getattr(cause, "full_key", None)
    return ConfigError(f"{full_key}: {_first_line(cause)}" if full_key else _first_line(cause))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
