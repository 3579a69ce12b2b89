"""Whole runs: recipes finish inside their gap, a resumed run is what it would have been, a killed one loses nothing."""

import os
import signal
import time

import pytest
from safetensors.torch import load_file

from orbit_cli.telemetry.names import unknown

GAP = 0.01
# Times differ between any two runs, and a resumed process has another history of memory.
UNREPEATABLE = ("_seconds", "_milliseconds", "per_second", "time", "rss_gib")


def repeatable(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.endswith(UNREPEATABLE)}


@pytest.mark.parametrize("recipe", ["smoke_dense_oft", "smoke_moe_lora", "smoke_mla_moe"])
def test_smoke_recipes_train_within_the_gap(orbit, recipe):
    orbit.run("train", f"recipe={recipe}", "run.name=smoke")
    rows = orbit.rows("smoke")
    assert len(rows) == 3
    assert all(row["logprob_gap_mean"] < GAP for row in rows if row["trained_tokens"])
    assert sum(row["trained_tokens"] for row in rows) > 0
    assert all(row["probe_gap_mean"] < GAP for row in rows)
    assert max(row["probe_moved_engine"] for row in rows) > 0
    assert unknown([*rows, *orbit.rows("smoke", "eval"), *orbit.rows("smoke", "sync")]) == set()
    figures = orbit.figures("smoke")
    assert figures["steps"] == 3
    assert figures["logprob_gap_max_step"] < GAP
    assert (orbit.root / "smoke" / "report.html").stat().st_size > 10_000


def test_a_real_model_learns(orbit):
    """The main job, cut short: the loop's sign, the swap and the sampling are right together. Seeded, so repeatable."""
    orbit.run("train", "run.name=learn", "trainer.steps=16", "evaluation.prompts=0")
    rewards = [row["reward_mean"] for row in orbit.rows("learn")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:2]) / 2 + 0.15, rewards
    assert orbit.figures("learn")["logprob_gap_max_step"] < GAP


FOUR = ["recipe=smoke_dense_oft", "evaluation.prompts=4", "evaluation.every=2"]


def test_two_and_two_are_four(orbit, kill_group):
    """4 steps, and 2 + kill -9 + resume to 4: the same adapter bit for bit, the same prompts and metrics."""
    orbit.run("train", *FOUR, "run.name=whole", "trainer.steps=4")
    process = orbit.start("train", *FOUR, "run.name=parts", "trainer.steps=4")
    orbit.wait_for_rows("parts", 2, process)
    kill_group(process, signal.SIGKILL)
    done = len(orbit.rows("parts"))
    assert 2 <= done < 4
    orbit.run("train", f"run.resume={orbit.root / 'parts'}")
    for kind in ("train", "eval"):
        whole, parts = orbit.rows("whole", kind), orbit.rows("parts", kind)
        assert [repeatable(r) for r in whole] == [repeatable(r) for r in parts]
    tensors = [
        load_file(orbit.root / name / "adapters" / "000004" / "adapter_model.safetensors")
        for name in ("whole", "parts")
    ]
    assert tensors[0].keys() == tensors[1].keys()
    assert all((tensors[0][name] == tensors[1][name]).all() for name in tensors[0])
    assert any(tensor.abs().max() > 0 for tensor in tensors[0].values())


def test_ctrl_c_finishes_the_step_and_leaves_no_process(orbit):
    process = orbit.start("train", "recipe=smoke_dense_oft", "run.name=stopped", "trainer.steps=500")
    orbit.wait_for_rows("stopped", 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engine's processes get it too
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-3000:]
    rows = orbit.rows("stopped")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    newest = sorted((orbit.root / "stopped" / "checkpoints").glob("step_*"))[-1]
    assert newest.name == f"step_{len(rows):06d}"
    time.sleep(1)
    assert not _group_members(process.pid)


def _group_members(group: int) -> list[int]:
    found = []
    for stat in os.listdir("/proc"):
        if stat.isdecimal():
            try:
                if os.getpgid(int(stat)) == group:
                    found.append(int(stat))
            except ProcessLookupError:
                continue
    return found
