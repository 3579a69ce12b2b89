"""The adapter that a command is told to serve: `run.adapter`, a PEFT folder or a run folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from orbit_cli.adapters.peft_version import load_peft_version, version_of_masters
from orbit_cli.adapters.sites import SHARED_PROJECTION
from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.adapter_run import run_of
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.engine.protocol import RolloutEngine
from orbit_cli.errors import CheckpointError, ParityError
from orbit_cli.planner.facts import Facts
from orbit_cli.planner.families import FAMILIES, shape_of
from orbit_cli.planner.shape import Weight
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.trainer.checkpoint import read_checkpoint
from orbit_cli.types import AdapterVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """An adapter read from disk, ready to be published."""

    name: str
    version: AdapterVersion
    trained_on: str = ""  # the model that its folder names
    origin: str = ""  # which version it is and where it lies, for people

    def publish(self, engine: RolloutEngine) -> int:
        """Give it to the engine; returns its version number. Raises ParityError if it arrives altered."""
        receipt = engine.publish(self.version)
        if receipt.checksum != self.version.checksum:
            raise ParityError(f"the adapter {self.name} arrived altered in the engine: {receipt.checksum[:12]}")
        return self.version.number

    def check(self, base: Path) -> None:
        """Raise CheckpointError naming the first linear that the model in `base` does not have, or not in this size."""
        facts = Facts(json.loads((base / "config.json").read_text(encoding="utf-8")), str(base / "config.json"))
        if facts.model_type not in FAMILIES:
            return
        found = {weight.path: weight for weight in shape_of(facts).weights}
        gates = [path for path in found if path.endswith(".experts.*.gate_proj")]  # a shared rotation has their input
        found |= {f"{path.removesuffix('*.gate_proj')}{SHARED_PROJECTION}": found[path] for path in gates}
        for name, tensor in self.version.tensors.items():
            path, _, kind = name.rpartition(".")
            problem = _difference(path, kind, tuple(tensor.shape), found.get(re.sub(r"\.\d+\.", ".*.", path)))
            if problem:
                origin = f" ({self.trained_on})" if self.trained_on else ""
                raise CheckpointError(
                    f"run.adapter: {self.name} was trained on another model{origin}: {problem}; set model to that one "
                    "or run.adapter to another"
                )


def resolve_adapter(config: OrbitConfig) -> ServedAdapter | None:
    """Read `run.adapter`, if set: a PEFT folder, or the newest version that a run has, exported or in a checkpoint.

    Raises CheckpointError where there is no adapter.
    """
    if config.run.adapter is None:
        return None
    path = Path(config.run.adapter).expanduser()
    if (path / "adapter_config.json").exists():
        name, run = path.resolve().name, run_of(path)
        if run is not None and name.isdecimal():
            return _exported(path, f"{run.name}/{name}", int(name), f"adapter version {int(name)}, from {path}")
        return _exported(path, name, 1, f"the adapter in {path}")
    run = RunFolder(path)
    exported, checkpoint = run.latest_adapter(), run.latest_checkpoint()
    number = int(exported.name) if exported is not None else -1
    if checkpoint is not None:
        state, data = read_checkpoint(checkpoint)
        if state.version > number:
            return _checkpointed(run, checkpoint, state.version, data["bank"])
    if exported is None:
        raise CheckpointError(
            f"run.adapter={path} is neither a PEFT folder (no adapter_config.json) nor a run folder with an adapter or "
            "a checkpoint; set it to one of these"
        )
    return _exported(exported, path.resolve().name, number, f"adapter version {number}, from {exported}")


def _exported(folder: Path, name: str, number: int, origin: str) -> ServedAdapter:
    version = load_peft_version(folder, number=number)
    about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    trained_on = Path(about.get("base_model_name_or_path") or "").name
    return ServedAdapter(name=name, version=version, trained_on=trained_on, origin=origin)


def _checkpointed(run: RunFolder, checkpoint: Path, number: int, masters: dict[str, Tensor]) -> ServedAdapter:
    """A run that was stopped has its newest adapter in its checkpoint alone."""
    config = run.load_config()
    return ServedAdapter(
        name=run.path.resolve().name,
        version=version_of_masters(masters, spec_from_config(config.adapter), number),
        trained_on=f"{config.model.name}-{config.quantization.format}",
        origin=f"adapter version {number}, from {checkpoint} (newer than any in {run.adapters})",
    )


def _difference(path: str, kind: str, shape: tuple[int, ...], weight: Weight | None) -> str | None:
    """What keeps a tensor of the adapter off the linear at `path`; `weight` stands for all linears named so."""
    numbers = [int(number) for number in re.findall(r"\.(\d+)\.", path)]  # layer, and expert
    if weight is None or numbers[0] not in weight.layers or (numbers[1:] and numbers[1] >= weight.per_layer):
        return f"it has an adapter for {path}, and this model has no such linear"
    inputs, outputs = weight.columns, weight.rows // weight.groups
    wanted = outputs if kind == "lora_B" else inputs
    size = {"oft_R": shape[0] * shape[-1], "lora_A": shape[-1], "lora_B": shape[0]}[kind]
    if size == wanted:
        return None
    side = "outputs" if kind == "lora_B" else "inputs"
    return f"its adapter for {path} has {size} {side}, and this model's linear has {wanted}"
