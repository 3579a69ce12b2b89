"""What the engine tests start: an engine on a tiny checkpoint with room for adapters of both kinds.

A module of its own, because every test folder has a `conftest` and only one of them can be imported by that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine_models import Reference, random_version

from orbit_cli.config.schema.system import EngineConfig, HardwareConfig
from orbit_cli.engine.sglang_engine import SGLangEngine
from orbit_cli.types import AdapterSpec, AdapterVersion

BLOCK, RANK = 16, 4


@dataclass
class Bench:
    """An engine with its checkpoint, its reference and a way to make versions with fresh numbers."""

    folder: Path
    engine: SGLangEngine
    reference: Reference
    spec: AdapterSpec
    numbers: int = 0

    def version(self, kind: str = "oft") -> AdapterVersion:
        self.numbers += 1
        return random_version(self.numbers, self.spec, self.reference.model, kind=kind)

    def clear(self) -> None:
        """Leave only the newest version, so that the next test has a free slot."""
        self.engine.retire()


def make_engine(folder: Path, spec: AdapterSpec, log: Path, **engine: object) -> SGLangEngine:
    return SGLangEngine(
        folder,
        spec,
        engine=EngineConfig(max_total_tokens=8192, live_versions=4, **engine),
        hardware=HardwareConfig(name="test", threads=1),
        model_dtype="float32",
        seed=0,
        log_path=log,
    )


def both_kinds(
    targets: tuple[str, ...], expert_targets: tuple[str, ...] = (), width: str = "per_expert"
) -> AdapterSpec:
    """A spec with room for OFT and LoRA versions on one engine."""
    names = {"targets": targets, "expert_targets": expert_targets, "expert_width": width}
    return AdapterSpec(kind="oft", **names, block_size=BLOCK, rank=RANK, scaling=1.5)
