"""What memory.offload=swap takes of the machine's own memory, and what happens where that is too little or unknown."""

from __future__ import annotations

from planning import bases, planned

from orbit_cli.commands.plan_formulas import formulas_text
from orbit_cli.commands.plan_text import plan_text
from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.notes import notes
from orbit_cli.planner.part import Side
from orbit_cli.planner.view import to_json

SWAP = ("model=deepseek_v4_pro", "hardware=b200x8", "memory.offload=swap")
TWO_TIB, ONE_TB = "hardware.host_memory_mib=2097152", "hardware.host_memory_mib=953675"


def test_both_bases_of_all_gpus_are_counted() -> None:
    plan = planned(*SWAP)
    trainer, engine = bases(plan.phases[0], Side.trainer), bases(plan.phases[1], Side.engine)
    assert abs(plan.host.nbytes / 1e9 - 8 * (trainer + engine)) < 1e-3
    for elsewhere in (SWAP[:-1], ("model=tiny_moe", "memory.offload=swap")):  # on a CPU nothing is brought away
        assert planned(*elsewhere).host.nbytes == 0
    assert planned(*SWAP, trains=False).host.nbytes == 0
    apart = planned("model=qwen3_4b", "hardware=h200x8", "memory.colocated=false", SWAP[-1], "engine.tensor_parallel=4")
    assert apart.host.nbytes == 0 and not any("host memory" in note for note in notes(apart))


def test_unknown_is_a_note() -> None:
    plan = planned(*SWAP)
    assert plan.fits
    assert "memory.offload=swap takes 1.9 TB of the machine's own memory, whose size is not known" in notes(plan)[0]
    assert to_json(plan)["host"]["memory_bytes"] is None


def test_enough_is_said() -> None:
    plan = planned(*SWAP, TWO_TIB)
    assert plan.fits and not any("not known" in note for note in notes(plan))
    assert "takes 1.9 TB of the machine's own memory, which has 2.2 TB" in " ".join(plan_text(plan).split())


def test_too_little_is_a_limit() -> None:
    plan = planned(*SWAP, ONE_TB)
    assert not plan.fits
    assert "needs 1.9 TB of the machine's own memory, which has 1.0 TB" in plan.limits[0]
    advised = nearest_fit(plan).overrides
    assert "memory.offload=none" in advised and planned(*SWAP, ONE_TB, *advised).fits
    two = planned("model=deepseek_v4_pro", "hardware=b200x8", ONE_TB)  # fits with a swap, and has no memory for one
    assert "memory.offload=swap" not in nearest_fit(two).overrides


def test_each_side_has_its_formula() -> None:
    plan = planned(*SWAP, TWO_TIB)
    found = to_json(plan)["host"]
    assert found["total_bytes"] == sum(found["parts"].values()) == plan.host.nbytes
    assert set(found["parts"]) == set(found["formulas"]) == {"trainer/base that waits", "engine/base that waits"}
    assert "131.5 GB of base x 8 GPUs" in found["formulas"]["trainer/base that waits"]
    assert "the machine's own memory: 1.9 TB" in formulas_text(plan)
