"""The adapter that a command is told to serve: `run.adapter`, a PEFT folder or a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orbit_cli.adapters.peft_version import load_peft_version
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.engine.protocol import RolloutEngine
from orbit_cli.errors import CheckpointError, ParityError
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.types import AdapterVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """An adapter read from disk, ready to be published."""

    name: str
    version: AdapterVersion

    def publish(self, engine: RolloutEngine) -> int:
        """Give it to the engine; returns its version number. Raises ParityError if it arrives altered."""
        receipt = engine.publish(self.version)
        if receipt.checksum != self.version.checksum:
            raise ParityError(f"the adapter {self.name} arrived altered in the engine: {receipt.checksum[:12]}")
        return self.version.number


def resolve_adapter(config: OrbitConfig) -> ServedAdapter | None:
    """Read `run.adapter`, if set. Raises CheckpointError where there is no adapter."""
    if config.run.adapter is None:
        return None
    path = Path(config.run.adapter).expanduser()
    folder = path if (path / "adapter_config.json").exists() else RunFolder(path).latest_adapter()
    if folder is None:
        raise CheckpointError(
            f"run.adapter={path} is neither a PEFT folder (no adapter_config.json) nor a run folder with an adapter; "
            "set it to one of these"
        )
    return ServedAdapter(name=path.name, version=load_peft_version(folder, number=1))
