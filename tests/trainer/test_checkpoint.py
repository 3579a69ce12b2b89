"""Checkpoints are whole or absent, and only the newest are kept."""

import pytest
import torch

from orbit_cli.errors import CheckpointError
from orbit_cli.trainer.checkpoint import TrainState, list_checkpoints, load_checkpoint, save_checkpoint


def test_round_trip_is_exact(tmp_path):
    weights = {"a": torch.randn(5, 7)}
    torch.manual_seed(11)
    save_checkpoint(tmp_path, TrainState(step=3, cursor=24, version=3), weights, {"state": {0: torch.randn(3)}}, keep=2)
    expected = torch.rand(4)
    state, bank, moments = load_checkpoint(list_checkpoints(tmp_path)[-1])
    assert state == TrainState(step=3, cursor=24, version=3)
    assert torch.equal(bank["a"], weights["a"])
    assert torch.equal(torch.rand(4), expected), "the generator goes on where it was"
    assert set(moments["state"]) == {0}


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        save_checkpoint(tmp_path, TrainState(step=step), {}, {}, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000004", "step_000005"]


def test_a_partial_folder_is_no_checkpoint(tmp_path):
    save_checkpoint(tmp_path, TrainState(step=1), {}, {}, keep=2)
    (tmp_path / ".step_000002.partial").mkdir()
    (tmp_path / ".step_000002.partial" / "meta.json").write_text("{}")
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000001"]


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = save_checkpoint(tmp_path, TrainState(step=1), {}, {}, keep=2)
    (path / "state.pt").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(CheckpointError, match="step_000001"):
        load_checkpoint(path)


def test_a_kill_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    """Ctrl-C after a step that is on disk saves it again, and removing the older ones takes time."""
    save_checkpoint(tmp_path, TrainState(step=1), {}, {}, keep=1)
    step = save_checkpoint(tmp_path, TrainState(step=2), {"a": torch.ones(2)}, {}, keep=2)
    before = step.stat().st_ino
    assert save_checkpoint(tmp_path, TrainState(step=2), {"a": torch.ones(2)}, {}, keep=2) == step
    assert step.stat().st_ino == before

    def killed(path, ignore_errors=False):
        if not ignore_errors:
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, TrainState(step=3), {}, {}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002", "step_000003"]
