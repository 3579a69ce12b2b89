"""A disk without room or a limit on files: one sentence that names the file; what was finished is whole, the rest gone.

The limit of the process on the size of a file stands in for a full disk: both are errors of the same system calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orbit_cli.config.compose import compose
from orbit_cli.config.schema.base import QuantizationConfig
from orbit_cli.errors import ConfigError, StorageError, storage_error, writing
from orbit_cli.quantization.convert import quantize_checkpoint
from orbit_cli.quantization.gguf import shipped_smollm2
from orbit_cli.telemetry.files import AppendedFile, write_atomic
from orbit_cli.telemetry.metrics import MetricsWriter, read_rows
from orbit_cli.telemetry.run_folder import RunFolder, RunState
from orbit_cli.trainer.checkpoint import TrainState, list_checkpoints, save_checkpoint

LIMIT = "may not grow that large"


def orbit(*arguments: str, stdout: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orbit_cli", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [["plan"], ["config"], ["--help"]])
def test_standard_output_on_a_full_disk(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = orbit(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("orbit: standard output cannot be written (No space left on device)")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_stops_is_no_error() -> None:
    reading, writing_end = os.pipe()
    os.close(reading)
    with open(writing_end, "w") as closed:
        done = orbit("plan", stdout=closed)
    assert done.stderr == ""


def test_a_row_is_whole_or_not_there(tmp_path: Path, largest_file) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with MetricsWriter(metrics) as writer:
        writer.write("train", 1, {"reward_mean": 0.5})
        with largest_file(metrics.stat().st_size + 20), pytest.raises(StorageError, match=f"{metrics} .*{LIMIT}"):
            writer.write("train", 2, {"reward_mean": 0.5})
        assert metrics.read_text().endswith("}\n")
        writer.write("train", 2, {"reward_mean": 0.5})
    assert [row["step"] for row in read_rows(metrics)] == [1, 2]


def test_a_file_appears_with_its_first_piece(tmp_path: Path, largest_file) -> None:
    with AppendedFile(tmp_path / "rows") as rows:
        with largest_file(3), pytest.raises(StorageError):
            rows.append("long\n")
        assert list(tmp_path.iterdir()) == []
        rows.append("one\n")
        rows.append("two\n")
    assert (tmp_path / "rows").read_text() == "one\ntwo\n"


def test_a_file_that_is_replaced(tmp_path: Path, largest_file) -> None:
    write_atomic(tmp_path / "file", "old")
    with largest_file(10), pytest.raises(StorageError, match=LIMIT):
        write_atomic(tmp_path / "file", "x" * 100)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_checkpoint(tmp_path: Path, largest_file) -> None:
    bank = {"w": torch.ones(10_000)}
    save_checkpoint(tmp_path, TrainState(step=1), bank, {}, keep=1)
    with largest_file(4096), pytest.raises(StorageError, match=f"step_000002.*{LIMIT}"):
        save_checkpoint(tmp_path, TrainState(step=2), bank, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"] == [p.name for p in list_checkpoints(tmp_path)]


def test_a_conversion(tmp_path: Path, largest_file) -> None:
    with largest_file(1 << 20), pytest.raises(StorageError, match=LIMIT):
        quantize_checkpoint(shipped_smollm2(), tmp_path / "out", QuantizationConfig())
    assert list(tmp_path.iterdir()) == []


def run_of(tmp_path: Path) -> RunFolder:
    return RunFolder.create(compose(["recipe=smoke_dense_oft", f"run.root={tmp_path}"]))


def test_a_run_says_that_it_failed_where_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_of(tmp_path)
    (folder.path / "samples.jsonl").write_text("{}\n")

    def full(*_: object) -> None:
        raise StorageError("no room")

    with pytest.raises(StorageError, match="the disk is full"), folder.running():
        monkeypatch.setattr("orbit_cli.telemetry.run_folder.write_json", full)
        raise RuntimeError("iostream error") from OSError(28, "No space left on device")
    status = folder.status()
    assert status is not None and status.state is RunState.failed and "the disk is full" in str(status.error)


def test_a_run_that_recorded_nothing_leaves_nothing(tmp_path: Path) -> None:
    folder = run_of(tmp_path)
    with pytest.raises(StorageError), folder.running():
        raise StorageError("no room")
    assert list(tmp_path.iterdir()) == []


def test_no_run_begins_where_its_config_cannot_be_written(tmp_path: Path, largest_file) -> None:
    with largest_file(100), pytest.raises(ConfigError, match=r"run\.root=.* cannot hold run folders"):
        run_of(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_libraries_make_of_it_is_recognised() -> None:
    for text in ("I/O error: No space left on device (os error 28)", "unable to resize file </x>: File too large (27)"):
        full = storage_error(RuntimeError(text), "here")
        assert full is not None and str(full).startswith("here cannot be written")
    assert storage_error(RuntimeError("anything else"), "here") is None
    with pytest.raises(ZeroDivisionError), writing("here"):
        raise ZeroDivisionError
    assert json.dumps(str(storage_error(OSError(28, "No space left on device", "file"), "here"))).startswith('"file ')
