"""`orbit report` of runs that failed, that were killed, and whose files were damaged by something else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orbit_cli import cli
from orbit_cli.config.compose import compose
from orbit_cli.errors import RunError, UserError
from orbit_cli.telemetry.report import figures, summary_text, write_report
from orbit_cli.telemetry.run_folder import RunFolder, RunState


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that stopped after one step."""
    folder = RunFolder.create(compose([f"run.root={tmp_path}", "logging.console=plain"]))
    folder.metrics.write_text('{"kind": "train", "step": 1, "time": "t", "reward_mean": 0.5}\n')
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.json", "5"),
        ("memory.json", '{"phases": 3}'),
        ("layers.json", "[1]"),
        ("layers.json", '{"layers": [3]}'),
        ("receipts.json", '{"blocks": {"run": 1}, "adapted": []}'),
        ("samples.jsonl", '{"step": 1}\n'),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"kind": "train", "step": "x"}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": 1, "reward_mean": "x"}\n'),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str, folder: RunFolder) -> None:
    (folder.path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name} is damaged .*remove"):
        write_report(folder.path)


def test_a_failed_run_says_why(folder: RunFolder) -> None:
    with pytest.raises(RunError), folder.running():
        raise RunError("no prompt left a gradient")
    text = summary_text(figures(folder.path))
    assert "failed with   RunError: no prompt left a gradient" in text
    assert "RunError: no prompt left a gradient" in write_report(folder.path).read_text()


def test_what_is_next_for_a_run_that_is_not_finished(folder: RunFolder) -> None:
    folder.set_status(RunState.interrupted)
    assert f"next          orbit train run.resume={folder.path}" in summary_text(figures(folder.path))
    (folder.checkpoints / "step_000001").mkdir()
    (folder.checkpoints / "step_000001" / "meta.json").write_text("{}")
    assert f"or            orbit eval run.adapter={folder.path}" in summary_text(figures(folder.path))
    folder.set_status(RunState.finished)
    assert f"next          orbit eval run.adapter={folder.path}" in summary_text(figures(folder.path))


def test_the_page_is_named_once(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["orbit", "report", str(folder.path)])
    for _ in range(2):
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().out.count("report.html") == 1


def test_sizes_that_are_compared_have_one_unit(folder: RunFolder) -> None:
    def pair(planned: float, measured: float, off: float) -> dict[str, float]:
        return {"planned_gib": planned, "measured_gib": measured, "off_percent": off}

    memory = {
        "process_gib_is": "peak",
        "phases": {"train": {"process_gib": 1.0}},
        "planned": {"train": {"process_gib": pair(1.06, 0.998, 6.2)}},
        "parts": {"base": pair(0.25, 0.251, -0.4)},
    }
    folder.memory.write_text(json.dumps(memory))
    row = {"forward_ms": 2.0, "backward_ms": 4.0, "kept_mib": 8.0}
    folder.layers.write_text(json.dumps({"about": "a step", "tokens": 64, "layers": [row, row]}))
    page = write_report(folder.path).read_text()
    assert "<td>1.06 GiB</td><td>1.00 GiB</td><td>+6 %</td>" in page
    assert "<td>256.0 MiB</td><td>257.0 MiB</td><td>0 %</td>" in page
    assert "<th>layers (2)</th>" in page
