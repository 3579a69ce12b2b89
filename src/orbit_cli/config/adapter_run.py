"""The config of a command that serves the adapter of a run (`orbit eval`, `orbit rollout` with run.adapter=RUN).

An adapter means something only on the base it was trained on, so what the run was trained on and how comes from its
own config.yaml. Lowest first: conf/, the run's sections, what the command line sets. A group on the command line takes
the place of the run's sections that it stands for, and a recipe of all of them. An adapter's folder below a run's
adapters/ leads to its run; a PEFT folder elsewhere names no config, and nothing is taken from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from orbit_cli.config.checks import suggestion
from orbit_cli.config.compose import Composition, Layer, compose_layers, flatten
from orbit_cli.config.locate import GROUPS
from orbit_cli.config.overrides import COMMAND_LINE
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.serialize import read_yaml, to_plain
from orbit_cli.errors import ConfigError

TAKEN = ("model", "quantization", "adapter", "environment", "evaluation", "engine", "hardware")
ADAPTERS = ("adapters", "replaced_adapters")  # folders of a run
LENGTHS = ("max_new_tokens", "max_prompt_tokens")  # of rollout
STANDS_FOR = {  # group -> sections of the run that it takes the place of
    "model": ("model", "quantization", "adapter", "engine"),  # a model chooses its format, targets and engine arguments
    "hardware": ("hardware", "engine"),
    "experiment": ("evaluation", "rollout"),
}
BASE = ("model", "quantization")
PEFT_KEYS = {  # of an adapter_config.json
    "block_size": "oft_block_size",
    "neumann_terms": "num_cayley_neumann_terms",
    "rank": "r",
    "alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "expert_width": "expert_width",
}
# where a base lies or comes from does not make it another
ELSEWHERE = ("model.path", "model.repository", "model.made_by", "quantization.cache_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A composition under which an adapter is served, and the run it was taken from (None: from none)."""

    composition: Composition
    given: Path | None = None  # run.adapter
    run: Path | None = None
    trained: dict[str, Any] | None = None  # the run's own config

    def note(self, config: OrbitConfig) -> str | None:
        """One line on what comes from the run and where its base is not the one that is served; None without a run."""
        if self.given is None or self.run is None or self.trained is None:
            return None
        whose = "its" if self.given == self.run else "its run's"
        taken = [name for name in TAKEN if any(path.startswith(f"{name}.") for path in self._layer)]
        taken += ["rollout lengths"] if any(path.startswith("rollout.") for path in self._layer) else []
        said = (
            f"{', '.join(taken)} are those of {whose} config.yaml"
            if taken
            else f"the recipe says it all, not {whose} config.yaml"
        )
        before, now = (flatten({name: plain[name] for name in BASE}, "") for plain in (self.trained, to_plain(config)))
        other = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in ELSEWHERE]
        if other:
            said += f"; it was trained with {other[0]}={before.get(other[0])} and is served with {now.get(other[0])}"
        return f"run.adapter={self.given}: {said}"

    def check(self, config: OrbitConfig) -> None:
        """Refuse to hold out rows of a file that the run was trained on. Raises ConfigError."""
        if self.trained is None:
            return
        environment, before = config.environment, self.trained["environment"]
        same_file = environment.path is not None and environment.path == before.get("path")
        held_out, wanted = self.trained["evaluation"]["prompts"], config.evaluation.prompts
        if same_file and environment.eval_path is None and before.get("eval_path") is None and wanted > held_out:
            raise ConfigError(
                f"evaluation.prompts={wanted} would take rows of environment.path={environment.path} that "
                f"{self.run} was trained on, which held out the last {held_out}; set evaluation.prompts={held_out} or "
                "less, or environment.eval_path to other rows"
            )

    @property
    def adds(self) -> bool:
        """Whether the run sets what the overrides do not say."""
        return bool(self._layer)

    @property
    def _layer(self) -> dict[str, Any]:
        return next((layer.values for layer in self.composition.layers if layer.source == _source(self.run)), {})


def compose_served(overrides: list[str]) -> Served:
    """As `compose_layers`, with the run of run.adapter as a layer below the command line. Raises ConfigError."""
    composition = compose_layers(overrides)
    given = OmegaConf.select(composition.raw, "run.adapter")
    if given is None:
        return Served(composition=composition)
    folder = Path(given).expanduser()
    _check_folder(given, folder)
    run = run_of(folder)
    keys = {override.partition("=")[0].lstrip("+~") for override in overrides}
    if run is None:
        _check_adapter(composition, keys, given, _described(folder))
        return Served(composition=composition, given=folder)
    trained = to_plain(read_yaml(run / "config.yaml"))
    _check_adapter(composition, keys, given, trained["adapter"])
    if keys & {"recipe", "recipes"}:
        return Served(composition=composition, given=folder, run=run, trained=trained)
    replaced = {section for key in keys & set(GROUPS) - {"adapter"} for section in STANDS_FOR.get(key, (key,))}
    sections = {name: trained[name] for name in TAKEN if name not in replaced}
    lengths = {name: trained["rollout"][name] for name in LENGTHS if "rollout" not in replaced}
    plain = OmegaConf.to_container(composition.raw, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    plain |= sections | {"rollout": plain["rollout"] | lengths}
    merged = OmegaConf.create(plain)
    *files, last = composition.layers
    assert last.source == COMMAND_LINE, "the command line is the highest layer"
    for path, value in last.values.items():
        OmegaConf.update(merged, path, value)
    values = flatten(sections, "") | {f"rollout.{name}": value for name, value in lengths.items()}
    layers = [*files, Layer(source=_source(run), values=values), last]
    raw = OmegaConf.merge(OmegaConf.structured(OrbitConfig), merged)
    return Served(composition=Composition(raw=raw, layers=layers), given=folder, run=run, trained=trained)


def run_of(folder: Path) -> Path | None:
    """The run whose config.yaml says what the adapter in `folder` was trained on; None if there is none.

    `folder` is a run's, or that of an adapter, which belongs to the run in whose adapters/ it lies.
    """
    if not (folder / "adapter_config.json").exists():
        return folder if (folder / "config.yaml").is_file() else None
    within = folder.resolve().parent
    return within.parent if within.name in ADAPTERS and _is_run(within.parent) else None


def _is_run(folder: Path) -> bool:
    """Whether its config.yaml is a run's, damaged or not; other tools have a config.yaml beside their adapters/ too."""
    if not (folder / "config.yaml").is_file() or (folder / "status.json").is_file():
        return (folder / "config.yaml").is_file()
    try:
        read_yaml(folder / "config.yaml")
    except ConfigError:
        return False
    return True


def _check_folder(given: str, folder: Path) -> None:
    """Refuse a run.adapter that cannot be one, before what the config says without it. Raises ConfigError."""
    remedy = "set it to the folder of a run or of a PEFT adapter"
    if not given.strip():
        raise ConfigError(
            f"run.adapter={given} names no folder, as an empty shell variable does; {remedy}, or leave it out for the "
            "base alone"
        )
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*") if path.is_dir()]
        what = "is no folder" if folder.exists() else "does not exist"
        versions = sorted(path.parent.name for path in folder.parent.glob("*/adapter_config.json"))
        if folder.parent.name in ADAPTERS and versions:
            raise ConfigError(
                f"run.adapter={given} {what}; {folder.parent} has {', '.join(versions)}: the versions that were "
                "evaluated (evaluation.every) and the last one; set it to one of these"
            )
        raise ConfigError(f"run.adapter={given} {what}; {remedy}{suggestion(folder.name, siblings)}")
    if any((folder / name).is_file() for name in ("adapter_config.json", "config.yaml")):
        return
    if (folder / "status.json").is_file():
        raise ConfigError(
            f"run.adapter={given} is a run's folder without its config.yaml, which says what it was trained on; "
            "copy that file back, or set run.adapter to a folder below its adapters/"
        )
    if not any(folder.glob("adapters/*/adapter_config.json")):
        raise ConfigError(
            f"run.adapter={given} is neither a PEFT folder (no adapter_config.json) nor a run folder (no config.yaml); "
            f"{remedy}"
        )


def _described(folder: Path) -> dict[str, Any]:
    """What a PEFT folder says of itself, by our keys; nothing where it is damaged, which loading it tells."""
    try:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = None
    if not isinstance(about, dict):
        return {}
    found = {key: about[name] for key, name in PEFT_KEYS.items() if name in about}
    found.setdefault("expert_width", "per_expert")  # of folders that were written before there was another
    return found | {"kind": str(about.get("peft_type")).lower()}


def _check_adapter(composition: Composition, keys: set[str], given: str, has: dict[str, Any]) -> None:
    """Refuse adapter settings on the command line that are not those which the adapter `has`. Raises ConfigError."""
    asked = [path.partition(".")[2] for path in composition.layers[-1].values if path.startswith("adapter.")]
    section = OmegaConf.to_container(composition.raw.adapter, resolve=True, enum_to_str=True)
    assert isinstance(section, dict)
    for key in ["kind"] * ("adapter" in keys) + asked:
        if key in has and has[key] == section[key]:
            continue
        made = f"was made with {key}={has[key]}" if key in has else "is what its files say"
        what = f"adapter={section[key]}" if key not in asked else f"adapter.{key}={section[key]}"
        raise ConfigError(
            f"{what} would do nothing beside run.adapter={given}: that adapter {made} and is served as it is; leave "
            f"{what} out, or set run.adapter to another"
        )


def _source(run: Path | None) -> str:
    return str(run / "config.yaml") if run else ""
