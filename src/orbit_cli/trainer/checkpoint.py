"""Checkpoints: everything a resumed run needs to be the run it would have been.

A checkpoint is a folder that appears by one rename, after its files are on disk: a killed process leaves either the
whole of it or nothing. Sampling needs no generator state, because each sample's seed is a function of its place.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from orbit_cli.errors import CheckpointError, writing

_STATE = "state.pt"
_META = "meta.json"


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Where a run is."""

    step: int = 0  # finished training steps
    cursor: int = 0  # next training prompt of the environment
    version: int = 0  # number of the adapter version that step `step` produced
    wandb_id: str | None = None


def save_checkpoint(
    folder: Path, state: TrainState, bank_state: dict[str, Any], optimizer_state: dict[str, Any], keep: int
) -> Path:
    """Write `folder/step_000012` atomically and remove all but the newest `keep` checkpoints.

    One that is there already stays: it is the same step of this run, and nothing replaces a folder in one move.
    Raises StorageError if the disk is full; the older checkpoints are then all there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{state.step:06d}"
    if (final / _META).exists():
        return final
    partial = folder / f".{final.name}.partial"
    content = {"bank": bank_state, "optimizer": optimizer_state, "torch_rng": torch.get_rng_state()}
    shutil.rmtree(partial, ignore_errors=True)
    with writing(final):
        try:
            partial.mkdir()
            with open(partial / _STATE, "wb") as file:  # torch's own file writer keeps no errno
                torch.save(content, file)
            (partial / _META).write_text(json.dumps(asdict(state), indent=1))
            for name in (_STATE, _META):
                _flush(partial / name)
            if final.exists():  # what is left of it without its meta.json
                shutil.rmtree(final)
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    _flush(folder)
    for old in list_checkpoints(folder)[:-keep]:
        (old / _META).unlink()  # first, so that what a killed process leaves of it is no checkpoint
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step_*") if (p / _META).exists())


def load_checkpoint(path: Path) -> tuple[TrainState, dict[str, Any], dict[str, Any]]:
    """(state, bank state, optimizer state) of a checkpoint folder; sets torch's generator. Raises CheckpointError."""
    state, data = read_checkpoint(path)
    torch.set_rng_state(data["torch_rng"])
    return state, data["bank"], data["optimizer"]


def read_checkpoint(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """(state, {bank, optimizer, torch_rng}) of a checkpoint folder; changes nothing. Raises CheckpointError."""
    try:
        state = TrainState(**json.loads((path / _META).read_text()))
        data = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({error}); remove it to resume from an older one"
        ) from error
    return state, data


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
