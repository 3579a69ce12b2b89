"""Whole runs: a resumed run is what it would have been, a killed one loses nothing, a stopped one ends cleanly."""

import json
import os
import shutil
import signal
import time

import pytest
from e2e_orbit import Orbit
from safetensors.torch import load_file

# Times differ between any two runs, and a resumed process has another history of memory.
UNREPEATABLE = ("_seconds", "_milliseconds", "per_second", "time", "rss_gib")


def repeatable(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.endswith(UNREPEATABLE)}


FOUR = ["recipe=smoke_dense_oft", "evaluation.prompts=4", "evaluation.every=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, bases) -> Orbit:
    """Four steps in one go, in the run folder `whole`."""
    orbit = Orbit(tmp_path_factory.mktemp("whole"), bases)
    orbit.run("train", *FOUR, "run.name=whole", "trainer.steps=4")
    return orbit


def test_two_and_two_are_four(orbit, whole, kill_group):
    """4 steps, and 2 + kill -9 + resume to 4: the same adapter bit for bit, the same prompts and metrics."""
    process = orbit.start("train", *FOUR, "run.name=parts", "trainer.steps=4")
    orbit.wait_for_rows("parts", 2, process)
    kill_group(process, signal.SIGKILL)
    done = len(orbit.rows("parts"))
    assert 2 <= done < 4
    orbit.run("train", f"run.resume={orbit.root / 'parts'}")
    for kind in ("train", "eval"):
        assert [repeatable(r) for r in whole.rows("whole", kind)] == [repeatable(r) for r in orbit.rows("parts", kind)]
    tensors = [
        load_file(runs.root / name / "adapters" / "000004" / "adapter_model.safetensors")
        for runs, name in ((whole, "whole"), (orbit, "parts"))
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
    assert f"go on with: orbit train run.resume={orbit.root / 'stopped'}" in out + err
    rows = orbit.rows("stopped")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    newest = sorted((orbit.root / "stopped" / "checkpoints").glob("step_*"))[-1]
    assert newest.name == f"step_{len(rows):06d}"
    time.sleep(1)
    assert not _group_members(process.pid)


def test_ctrl_c_while_the_engine_starts_acts_at_once(orbit):
    process = orbit.start("train", "recipe=smoke_dense_oft", "run.name=early")
    for line in process.stdout:
        if "starting the SGLang engine" in line:
            break
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err[-3000:]
    assert time.monotonic() - started < 10
    assert err.strip() == "orbit: stopped before training began"
    assert json.loads((orbit.root / "early" / "status.json").read_text())["state"] == "interrupted"
    time.sleep(1)
    assert not _group_members(process.pid)


def test_eval_of_a_trained_run_shows_base_and_adapter(orbit, whole):
    trained = whole.root / "whole"
    text = orbit.run("eval", f"run.adapter={trained}")  # the model and all else are those of the run
    assert "base" in text and "whole" in text and "pass@1" in text
    after = whole.rows("whole", "eval")[-1]
    assert f"eval of whole: accuracy {after['accuracy']:.3f}  [{after['accuracy_low']:.3f}" in text
    assert f"whole: adapter version 4, from {trained / 'adapters' / '000004'}" in text


def test_eval_of_a_killed_run_takes_its_checkpoint(orbit, whole):
    trained, killed = whole.root / "whole", orbit.root / "killed"
    shutil.copytree(trained, killed)
    for version in ("000002", "000004"):
        shutil.rmtree(killed / "adapters" / version)
    text = orbit.run("eval", f"run.adapter={killed}", "evaluation.base=false")
    assert f"adapter version 4, from {killed / 'checkpoints' / 'step_000004'}" in text
    accuracy = whole.rows("whole", "eval")[-1]["accuracy"]
    assert f"eval of killed: accuracy {accuracy:.3f}" in text


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
