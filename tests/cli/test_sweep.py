"""Multirun: a process, a log and a run folder per job; failures are told and do not stop the others.

The jobs here are a small program that makes a real run folder through the same API as a training, so that the sweep is
seen without an engine. Sweeps of real trainings are in tests/e2e.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from orbit_cli.commands.sweep import run_sweep
from orbit_cli.config.serialize import read_yaml
from orbit_cli.errors import ConfigError

JOB = """
import sys
from orbit_cli.config.compose import compose
from orbit_cli.telemetry.metrics import MetricsWriter
from orbit_cli.telemetry.run_folder import RunFolder

config = compose(sys.argv[1:])
if config.seed == 4:
    sys.exit("orbit: the fourth seed does not fit")
folder = RunFolder.create(config)
with folder.running(), MetricsWriter(folder.metrics) as metrics:
    for step in range(1, 6):
        metrics.write("train", step, {"reward_mean": step / 10 * config.seed, "logprob_gap_mean": 1e-5})
    if config.seed == 3:
        raise RuntimeError("the third seed is unlucky")
"""


@pytest.fixture
def job(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(JOB))
    return (sys.executable, str(script))


def folders(root: Path) -> list[Path]:
    (sweep,) = root.glob("sweep-*")
    return sorted(path for path in sweep.iterdir() if path.name.isdecimal())


def test_four_jobs_have_four_folders(job: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "runs"
    overrides = ["recipe=sweep_adapters", f"run.root={root}", "adapter=oft,lora", "seed=1,2", "run.name=2E3"]
    assert run_sweep(overrides, command=job) == 0
    jobs = folders(root)
    runs = [read_yaml(next(folder.glob("*/config.yaml"))) for folder in jobs]
    assert [(run.adapter.kind, run.seed) for run in runs] == [("oft", 1), ("oft", 2), ("lora", 1), ("lora", 2)]
    assert {run.model.name for run in runs} == {"tiny_dense"}  # the recipe reached every job
    assert {run.run.name for run in runs} == {"2E3"}
    shown = capsys.readouterr().out
    assert "0.200 -> 1.000" in shown and "finished" in shown
    recorded = json.loads((jobs[0].parent / "jobs.json").read_text())
    assert [entry["exit_code"] for entry in recorded] == [0, 0, 0, 0]
    assert len({entry["run"] for entry in recorded}) == 4


def test_a_failing_job_is_listed_and_its_log_has_the_traceback(
    job: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    assert run_sweep([f"run.root={root}", "seed=1,3,2"], command=job) == 1
    jobs = folders(root)
    assert len(jobs) == 3  # the jobs after it ran
    log = (jobs[1] / "log.txt").read_text()
    assert log.startswith("$ orbit train seed=3")
    assert "RuntimeError: the third seed is unlucky" in log and "Traceback" in log
    assert "Traceback" not in (jobs[2] / "log.txt").read_text()
    shown = capsys.readouterr().out
    assert "failed (1)" in shown
    assert str(jobs[1] / "log.txt") in shown.replace("\n", "")


def test_a_refusal_is_told_beside_the_table(
    job: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep([f"run.root={tmp_path / 'runs'}", "seed=4,1"], command=job) == 1
    assert "job 0 failed with exit code 1: the fourth seed does not fit" in capsys.readouterr().out


def test_recipes_can_be_swept(job: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert run_sweep([f"run.root={root}", "recipe=smoke_dense_oft,smoke_moe_lora"], command=job) == 0
    runs = [read_yaml(next(folder.glob("*/config.yaml"))) for folder in folders(root)]
    assert [run.model.name for run in runs] == ["tiny_dense", "tiny_moe"]


@pytest.mark.parametrize("wrong", ["adapter=oft,lorra", "seed=1,b", "recipe=main_job,none", "trainer.stepz=1,2"])
def test_a_mistake_starts_no_job(wrong: str, job: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run_sweep([f"run.root={tmp_path / 'runs'}", wrong], command=job)
    assert not (tmp_path / "runs").exists()


def test_another_launcher_that_is_not_installed(job: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launcher"):
        run_sweep([f"run.root={tmp_path}", "seed=1,2", "hydra/launcher=none_such"], command=job)
