"""What the planner restates, because it may not load torch, is what the other rooms use."""

from __future__ import annotations

from orbit_cli.adapters.parts import CHUNK_ELEMENTS
from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.models.families import FAMILIES as TRAINABLE
from orbit_cli.planner import gpu_training, training
from orbit_cli.planner.adapters import FUSED
from orbit_cli.planner.families import FAMILIES
from orbit_cli.planner.storage import GROUP, NEVER
from orbit_cli.quantization import selection
from orbit_cli.quantization.formats import FORMATS
from orbit_cli.sglang_plugin.linear import FUSED as SERVED_FUSED
from orbit_kernels import chunked


def test_constants_are_those_of_their_owners() -> None:
    assert set(FUSED) == set(SERVED_FUSED.values()) == set(selection.FUSED)
    assert NEVER == selection.NEVER
    assert CHUNK_ELEMENTS == {"cuda": gpu_training.SERIES_CHUNK, "cpu": training.SERIES_CHUNK}
    assert gpu_training.TRIAL_BYTES == chunked.BUDGET
    assert {NumberFormat(name): group for name, group in GROUP.items()} == {f: m.GROUP for f, m in FORMATS.items()}


def test_what_can_be_trained_can_be_planned() -> None:
    assert set(TRAINABLE) <= set(FAMILIES)
