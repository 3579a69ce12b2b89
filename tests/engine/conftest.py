"""One engine start per model kind, shared by the tests of that kind (a start takes longer than all of its tests)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_models import ATTENTION, MLP, Reference, random_version, write_checkpoint

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


def both_kinds(targets: tuple[str, ...], expert_targets: tuple[str, ...] = ()) -> AdapterSpec:
    """A spec with room for OFT and LoRA versions on one engine."""
    return AdapterSpec(
        kind="oft", targets=targets, expert_targets=expert_targets, block_size=BLOCK, rank=RANK, scaling=1.5
    )


def _bench(folder: Path, model_type: str, quantised: tuple[str, ...], spec: AdapterSpec):
    model = write_checkpoint(folder / model_type, model_type, quantised=quantised)
    with make_engine(folder / model_type, spec, folder / f"{model_type}.log") as engine:
        yield Bench(folder / model_type, engine, Reference(model), spec)


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def dense(engine_folder):
    """qwen3, bfloat16 weights; two test files share it."""
    yield from _bench(engine_folder, "qwen3", (), both_kinds(ATTENTION + MLP))


@pytest.fixture(scope="module")
def moe(engine_folder):
    """qwen3_moe, INT4 attention and experts, adapters on both."""
    yield from _bench(engine_folder, "qwen3_moe", ("self_attn", "experts"), both_kinds(ATTENTION, MLP))


@pytest.fixture(scope="module")
def mla(engine_folder):
    """deepseek_v3, INT4 experts and MLPs; every linear adapted, absorbed kv_b_proj included."""
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *MLP)
    yield from _bench(engine_folder, "deepseek_v3", ("mlp",), both_kinds(targets, MLP))
