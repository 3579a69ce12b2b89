"""metrics.jsonl: on disk at once, readable after a crash, without a step counted twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orbit_cli.telemetry.metrics import MetricsWriter, read_rows
from orbit_cli.telemetry.names import NAMES, meaning, unknown

KILLED = """
import os, signal, sys
from pathlib import Path
from orbit_cli.telemetry.metrics import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]))
for step in range(1, 4):
    writer.write("train", step, {"reward_mean": step / 4})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        written = [
            writer.write("train", 1, {"reward_mean": 0.25, "version": 1}),
            writer.write("eval", 1, {"pass@4": 0.5}),
        ]
    assert read_rows(path) == written
    assert written[0]["kind"] == "train" and written[0]["reward_mean"] == 0.25


def test_what_was_written_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("train", 1, {"loss": 0.5})
    with open(path, "a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    assert [row["step"] for row in read_rows(path)] == [1]
    with MetricsWriter(path) as writer:
        writer.write("train", 2, {"loss": 0.25})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_resume_drops_the_rows_after_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("eval", 0, {"accuracy": 0.1})
        for step in range(1, 6):
            writer.write("train", step, {"loss": float(step)})
    with MetricsWriter(path, resume_step=3) as writer:
        writer.write("train", 4, {"loss": 44.0})
    assert [(row["kind"], row["step"]) for row in read_rows(path)] == [
        ("eval", 0),
        *(("train", step) for step in (1, 2, 3, 4)),
    ]
    assert read_rows(path)[-1]["loss"] == 44.0


def test_numbers_are_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(
            "train",
            1,
            {"loss": float("nan"), "grad_norm": float("inf"), "entropy": torch.tensor(0.5), "swap_bytes": 2**40},
        )
    row = json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert (row["loss"], row["grad_norm"], row["entropy"], row["swap_bytes"]) == (None, None, 0.5, 2**40)


def test_a_name_without_a_meaning_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("eval", 1, {"accuracy": 1.0, "pass@2": 1.0}, policy="base")
        assert unknown(read_rows(path)) == set()
        writer.write("train", 1, {"reward_maen": 1.0})  # no run may end over a name
        assert unknown(read_rows(path)) == {"reward_maen"}
        with pytest.raises(ValueError, match="trane"):
            writer.write("trane", 1, {})
    assert len(read_rows(path)) == 2


def test_names() -> None:
    assert all(meaning(name) for name in NAMES)
    assert meaning("pass@16") and meaning("pass@16_low")
    assert meaning("pass@0") is None and meaning("pass@4x") is None


def test_each_row_is_on_disk_before_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 4):
            writer.write("train", step, {"loss": 0.0})
            assert len(read_rows(path)) == step
    assert os.path.getsize(path) > 0
