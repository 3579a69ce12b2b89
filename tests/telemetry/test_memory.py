"""Peak memory by phase, of this process and of its children."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_cli.telemetry.memory import GIB, MemoryRecorder, children_gib, rss_gib

MIB = 1 << 20


PHASES = """
import sys
from pathlib import Path
from orbit_cli.telemetry.memory import MemoryRecorder

recorder = MemoryRecorder(Path(sys.argv[1]))
for name in ("small", "large", "small"):
    with recorder.phase(name):
        if name == "large":
            block = bytearray(200 << 20)
            block[::4096] = b"x" * len(block[::4096])
            del block
"""


def test_a_phase_has_its_own_peak(tmp_path: Path) -> None:
    """In a process of its own: what other tests left in the heap comes and goes."""
    subprocess.run([sys.executable, "-c", PHASES, str(tmp_path / "memory.json")], check=True)
    record = json.loads((tmp_path / "memory.json").read_text())
    small, large = (record["phases"][name]["process_gib"] for name in ("small", "large"))
    assert large - small > 150 / 1024 or record["process_gib_is"] != "peak in the phase"
    assert large > 0.19


def test_children_count(tmp_path: Path) -> None:
    before = children_gib()
    code = "x = bytearray(100 << 20); x[::4096] = b'x' * len(x[::4096]); print('up', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline().strip() == b"up"
        assert children_gib() - before > 90 / 1024
        assert rss_gib() > children_gib()
    finally:
        child.communicate(b"\n", timeout=20)


def test_the_engines_share_of_a_gpu_is_beside_its_plan(tmp_path: Path) -> None:
    recorder = MemoryRecorder(tmp_path / "memory.json")
    columns = {"cuda0_engine_gib": 4.0, "cuda0_engine_reserved_gib": 4.0}
    recorder.planned({"phases": {"rollout": columns}, "parts": {}, "about": ""})
    held = {"allocated": 5 * GIB, "reserved": 8 * GIB}
    recorder.engine(lambda: held)
    with recorder.phase("rollout"):
        held["allocated"] = 2 * GIB
    record = json.loads((tmp_path / "memory.json").read_text())["planned"]["rollout"]
    assert record["cuda0_engine_gib"] == {"planned_gib": 4.0, "measured_gib": 2.0, "off_percent": 100.0}
    assert record["cuda0_engine_reserved_gib"]["off_percent"] == -50.0


def test_a_phase_that_fails_does_not_ask_a_dead_engine(tmp_path: Path) -> None:
    recorder = MemoryRecorder(tmp_path / "memory.json")
    recorder.engine(lambda: pytest.fail("asked"))
    with pytest.raises(KeyError), recorder.phase("rollout"):
        raise KeyError("the engine ended")
    assert (tmp_path / "memory.json").exists()


def test_a_resumed_run_keeps_the_peaks(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    first = MemoryRecorder(path)
    with first.phase("train"):
        pass
    again = MemoryRecorder(path)
    with again.phase("rollout"):
        pass
    record = json.loads(path.read_text())
    assert set(record["phases"]) == {"train", "rollout"}


def test_planned_stands_beside_measured(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    recorder = MemoryRecorder(path)
    recorder.planned(
        {
            "phases": {"train": {"process_gib": 0.5}, "eval": {"process_gib": 9.0}},
            "parts": {"base": GIB},
            "about": "how",
        }
    )
    recorder.held({"base": 2 * GIB})
    with recorder.phase("train"):
        pass
    record = json.loads(path.read_text())
    assert set(record["planned"]) == {"train"}  # of what was measured
    pair = record["planned"]["train"]["process_gib"]
    measured = record["phases"]["train"]["process_gib"]
    assert pair == {
        "planned_gib": 0.5,
        "measured_gib": measured,
        "off_percent": pytest.approx(100 * (0.5 - measured) / measured),
    }
    assert record["about"] == "how"
    assert record["parts"]["base"] == {"planned_gib": 1.0, "measured_gib": 2.0, "off_percent": -50.0}


def test_without_a_plan_the_record_has_none(tmp_path: Path) -> None:
    recorder = MemoryRecorder(tmp_path / "memory.json")
    recorder.planned(None)
    with recorder.phase("eval"):
        pass
    assert set(json.loads((tmp_path / "memory.json").read_text())) == {"process_gib_is", "phases"}
