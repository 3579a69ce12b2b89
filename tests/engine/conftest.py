"""One engine start per model kind, shared by the tests of that kind (a start takes longer than all of its tests)."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_models import ATTENTION, MLP, Reference, write_checkpoint
from engine_setup import Bench, both_kinds, make_engine

from orbit_cli.types import AdapterSpec


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
