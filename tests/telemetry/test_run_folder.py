"""The run folder: unique whatever happens at once, honest about its state, and resumed only when that makes sense."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orbit_cli.config.adapter_run import run_of
from orbit_cli.config.compose import compose
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import ConfigError, UserError
from orbit_cli.runs.train import resume_note
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.run_folder import RunFolder, RunState, find_resumable

CREATE = """
import sys, time
from orbit_cli.config.compose import compose
from orbit_cli.telemetry.run_folder import RunFolder
config = compose(sys.argv[2:])
while time.time() < float(sys.argv[1]):
    pass
print(RunFolder.create(config).path)
"""


def config(root: Path, *more: str) -> OrbitConfig:
    return compose([f"run.root={root}", *more])


@pytest.mark.parametrize("name", [[], ["run.name=same"]])
def test_four_runs_started_at_once_never_share_a_folder(name: list[str], tmp_path: Path) -> None:
    import time

    start = str(time.time() + 8)
    command = [sys.executable, "-c", CREATE, start, f"run.root={tmp_path}", *name]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    made = [process.communicate(timeout=100)[0].strip() for process in processes]
    assert len(set(made)) == 4
    assert all((Path(path) / "config.yaml").is_file() for path in made)


def test_a_folder_is_always_new(tmp_path: Path) -> None:
    made = [RunFolder.create(config(tmp_path, "run.name=mine")).path.name for _ in range(3)]
    assert made == ["mine", "mine-2", "mine-3"]


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden", "sp ace", "2E3"])
def test_any_name_is_one_folder_below_the_root(name: str, tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, f"run.name='{name}'"))
    assert folder.path.parent == tmp_path.resolve()
    assert not folder.path.name.startswith(".")
    assert folder.load_config().run.name == name


def test_the_config_in_the_folder_is_the_config(tmp_path: Path) -> None:
    made = config(tmp_path, "recipe=smoke_mla_moe", "trainer.learning_rate=1E-7")
    assert RunFolder.create(made).load_config() == made


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.root=.* cannot hold run folders: .*; set run\.root to a folder"):
        RunFolder.create(config(tmp_path / "file"))


def test_states(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    with folder.running():
        status = folder.status()
        assert status is not None and status.alive and status.pid == os.getpid()
    assert folder.status().state is RunState.finished
    with pytest.raises(RuntimeError), folder.running():
        raise RuntimeError("no gradient")
    assert folder.status().state is RunState.failed
    assert folder.status().error == "RuntimeError: no gradient"
    with pytest.raises(KeyboardInterrupt), folder.running():
        raise KeyboardInterrupt
    assert folder.status().state is RunState.interrupted


def test_bad_input_leaves_no_folder_unless_something_was_recorded(tmp_path: Path) -> None:
    empty = RunFolder.create(config(tmp_path))
    with pytest.raises(UserError), empty.running():
        empty.engine_log.write_text("starting")
        raise ConfigError("model.path=/x has no config.json")
    assert not empty.path.exists()
    kept = RunFolder.create(config(tmp_path))
    with pytest.raises(UserError), kept.running():
        kept.metrics.write_text('{"kind": "train", "step": 1}\n')
        raise ConfigError("a prompt is too long")
    assert kept.status().state is RunState.failed


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    with folder.running():
        with pytest.raises(UserError, match="another process"), RunFolder(folder.path).running():
            pass
        assert folder.status().state is RunState.running
    with RunFolder(folder.path).running():
        pass


@pytest.mark.parametrize("text", ["{", "", '{"state": "weird"}', "[]"])
def test_a_damaged_status_is_named_and_passed_over_by_auto(tmp_path: Path, text: str) -> None:
    damaged, whole = (RunFolder.create(config(tmp_path)) for _ in range(2))
    whole.set_status(RunState.interrupted)
    (damaged.path / "status.json").write_text(text)
    with pytest.raises(UserError, match=r"status\.json is damaged"):
        damaged.status()
    assert find_resumable(config(tmp_path)) == whole


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError):
            RunFolder.open(path)


def test_resume_auto_takes_the_newest_unfinished_run_of_the_same_config(tmp_path: Path) -> None:
    folders = [RunFolder.create(config(tmp_path, f"run.name=run{i}")) for i in range(4)]
    other = RunFolder.create(config(tmp_path, "run.name=other", "seed=5"))
    for folder in (*folders, other):
        folder.set_status(RunState.interrupted)
    folders[3].set_status(RunState.finished)
    found = find_resumable(config(tmp_path, "run.resume=auto"))
    assert found == folders[2]
    folders[2].set_status(RunState.running)  # by this process, which is alive
    assert find_resumable(config(tmp_path)) == folders[1]
    assert find_resumable(config(tmp_path, "seed=6")) is None
    fresh = RunFolder.resume(config(tmp_path, "seed=6", "run.resume=auto"))
    assert fresh.path not in [folder.path for folder in folders]


def test_resume_auto_keeps_to_a_name_that_is_given(tmp_path: Path) -> None:
    """`mine` is the older one; a number that its folder got does not make it another run."""
    mine, other = (RunFolder.create(config(tmp_path, "trainer.steps=4", f"run.name={n}")) for n in ("mine", "other"))
    auto = config(tmp_path, "trainer.steps=9", "run.resume=auto", "run.name=mine")
    for folder in (mine, other):
        folder.set_status(RunState.finished)
    told = resume_note(auto, RunFolder.resume(auto))
    assert told and f"run.resume={mine.path} trainer.steps=9" in told and "of this config and run.name=mine" in told
    second = RunFolder(tmp_path / "mine-2")  # which auto made
    newer = RunFolder.create(config(tmp_path, "trainer.steps=9", "run.name=other"))
    for folder in (second, newer):
        folder.set_status(RunState.interrupted)
    assert RunFolder.resume(auto) == second
    assert find_resumable(config(tmp_path, "trainer.steps=9")) == newer


def test_resume_by_path_refuses_another_model(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, "run.name=a"))
    folder.set_status(RunState.interrupted)
    resumed = RunFolder.resume(config(tmp_path, f"run.resume={folder.path}", "trainer.steps=77"))
    assert resumed == folder
    assert folder.load_config().trainer.steps == 77
    with pytest.raises(ConfigError, match=r"adapter\.block_size was 32 and is now 64"):
        RunFolder.resume(config(tmp_path, f"run.resume={folder.path}", "adapter.block_size=64"))


def checkpointed(root: Path, *overrides: str) -> RunFolder:
    """A run with a checkpoint after step 4."""
    folder = RunFolder.create(config(root, "trainer.steps=4", *overrides))
    (folder.checkpoints / "step_000004").mkdir()
    (folder.checkpoints / "step_000004" / "meta.json").write_text("{}")
    return folder


def test_resume_to_fewer_steps_than_there_are_is_refused(tmp_path: Path) -> None:
    folder = checkpointed(tmp_path)
    folder.set_status(RunState.interrupted)
    before = folder.config.read_text()
    with pytest.raises(ConfigError, match=r"has 4 finished steps already; set trainer\.steps above 4"):
        RunFolder.resume(config(tmp_path, f"run.resume={folder.path}", "trainer.steps=2"))
    assert folder.config.read_text() == before
    again = config(tmp_path, f"run.resume={folder.path}", "trainer.steps=4")
    assert RunFolder.resume(again) == folder  # what follows the last step may be missing
    folder.set_status(RunState.finished)
    with pytest.raises(ConfigError, match="is finished after its 4 steps; set trainer.steps above 4"):
        RunFolder.resume(again)
    assert RunFolder.resume(config(tmp_path, f"run.resume={folder.path}", "trainer.steps=5")) == folder


def test_resuming_says_what_it_starts_from(tmp_path: Path) -> None:
    folder = checkpointed(tmp_path, "run.name=done")
    folder.set_status(RunState.finished)
    auto = config(tmp_path, "run.resume=auto", "trainer.steps=9")
    told = resume_note(auto, RunFolder.resume(auto))
    assert told and f"(extend the finished one with run.resume={folder.path} trainer.steps=9)" in told
    other = config(tmp_path, "run.resume=auto", "trainer.steps=9", "seed=5")
    told = resume_note(other, RunFolder.resume(other))
    assert told and "this is a new run" in told and "extend" not in told
    assert resume_note(auto, folder) is None
    shutil.rmtree(folder.checkpoints)
    folder.metrics.write_text('{"kind": "train", "step": 4}\n')
    told = resume_note(auto, folder)
    assert told and "starts again at step 1, and the rows of the 4 steps on record are dropped" in told


def test_resume_auto_names_the_run_it_goes_on_with_and_one_of_another_name(tmp_path: Path) -> None:
    killed = RunFolder.create(config(tmp_path, "run.name=a"))
    killed.set_status(RunState.interrupted)
    killed.engine_log.write_text("started")
    auto = config(tmp_path, "run.resume=auto", "run.name=a")
    assert RunFolder.resume(auto) == killed
    assert resume_note(auto, killed) == f"going on in {killed.path}, which was stopped before its first step"
    named = config(tmp_path, "run.resume=auto", "run.name=b")  # as a recipe may name it
    told = resume_note(named, RunFolder.resume(named))
    assert told and f"(go on with one of another name, a, by run.resume={killed.path})" in told


def test_a_run_that_goes_back_keeps_no_newer_adapter_as_its_own(tmp_path: Path) -> None:
    """Without checkpoints it starts again: what its first life exported is not what it ends with."""
    folder = RunFolder.create(config(tmp_path, "logging.console=plain"))

    def export(version: int, text: str) -> None:
        folder.adapter(version).mkdir(exist_ok=True)
        (folder.adapter(version) / "adapter_config.json").write_text(text)

    for version in (0, 2, 4):
        export(version, "first life")
    for text in ("second life", "third life"):
        with Recorder(folder, folder.load_config()) as recorder:
            recorder.open(0)
        assert folder.latest_adapter() == folder.adapter(0)
        assert sorted(path.name for path in folder.replaced_adapters.iterdir()) == ["000002", "000004"]
        assert run_of(folder.replaced_adapters / "000004") == folder.path
        export(2, text)
    with Recorder(folder, folder.load_config()) as recorder:
        recorder.open(2)  # a checkpoint of step 2
    assert folder.latest_adapter() == folder.adapter(2)
    kept = [folder.replaced_adapters / name / "adapter_config.json" for name in ("000002", "000004")]
    assert [path.read_text() for path in kept] == ["second life", "first life"]


def test_a_run_that_is_alive_cannot_be_resumed(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        status = folder.path / "status.json"
        status.write_text(status.read_text().replace(str(os.getpid()), str(sleeper.pid)))
        with pytest.raises(UserError, match="still running"):
            RunFolder.resume(config(tmp_path, f"run.resume={folder.path}"))
    finally:
        sleeper.communicate(b"\n", timeout=20)
    assert RunFolder.resume(config(tmp_path, f"run.resume={folder.path}")) == folder


def test_a_process_of_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    """Every start of a container gives orbit the same number: what was killed is gone on with all the same."""
    killed = RunFolder.create(config(tmp_path, "run.name=a"))
    status = json.loads((killed.path / "status.json").read_text())
    assert status["pid"] == os.getpid() and killed.status().alive
    (killed.path / "status.json").write_text(json.dumps({**status, "updated": "2020-01-01T00:00:00+00:00"}))
    assert not killed.status().alive
    assert RunFolder.resume(config(tmp_path, "run.name=a", "run.resume=auto")) == killed
