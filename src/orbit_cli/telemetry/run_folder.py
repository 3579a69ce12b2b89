"""The run folder: unique by construction, and the one place that knows what lies where in it.

config.yaml     the resolved config           metrics.jsonl   one object per training step, evaluation, publish
samples.jsonl   samples for people to read    memory.json     peaks by phase
adapters/       PEFT folders: the evaluated   checkpoints/    what resuming needs, of the newest steps
                versions and the last
engine.log      the engine's own log          wandb_id        id of the W&B run, reused on resume
receipts.json   what was printed at the start report.html     the report; summary.json: its figures
layers.json     time and memory by layer      status.json     running | finished | failed | interrupted, and the
                                                              process id
replaced_adapters/   what adapters/ had of steps that were done again
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.serialize import read_yaml, to_plain, to_yaml
from orbit_cli.errors import ConfigError, StorageError, UserError, storage_error
from orbit_cli.telemetry.files import read_json, write_atomic, write_json
from orbit_cli.telemetry.metrics import read_rows

LONGEST_PART = 40  # of a made-up name
CLOCK_SLACK = 2.0  # seconds by which a process may seem to start after it wrote something
FIXED_SECTIONS = ("model", "quantization", "adapter")  # of the config; a resumed run must keep them


class RunState(StrEnum):
    """How a run stands, as it wrote it itself. A killed run still says `running`: see RunStatus.alive."""

    running = "running"
    finished = "finished"
    failed = "failed"
    interrupted = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """Content of status.json."""

    state: RunState
    pid: int
    error: str | None
    updated: str  # ISO time

    @property
    def alive(self) -> bool:
        """Whether the process that wrote it runs. One that started later only has its number, as in a new container."""
        written = datetime.fromisoformat(self.updated).timestamp()
        return self.state is RunState.running and _started(self.pid) < written + CLOCK_SLACK


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. Make one with `create` or `open`."""

    path: Path

    @classmethod
    def create(cls, config: OrbitConfig) -> RunFolder:
        """Make a new folder below run.root and write config.yaml and status.json into it.

        Two runs started at the same moment never share one: mkdir decides. Raises ConfigError if run.root cannot be
        written to.
        """
        root = Path(config.run.root).expanduser()
        folder = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = cls(_claim(root, config))
            for sub in (folder.adapters, folder.checkpoints):
                sub.mkdir()
            write_atomic(folder.config, to_yaml(config))
            folder.set_status(RunState.running)
        except (OSError, StorageError) as error:
            if folder is not None:
                shutil.rmtree(folder.path, ignore_errors=True)
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"run.root={config.run.root} cannot hold run folders: {why}; set run.root to a folder that can be "
                "written to"
            ) from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder. Raises UserError if it is none."""
        folder = cls(Path(path).expanduser().resolve())
        if not folder.path.is_dir():
            raise UserError(f"{path} is no folder; give the folder of a run, for example one below runs/")
        if not folder.config.is_file():
            raise UserError(f"{path} has no config.yaml, so it is no run folder; give one that orbit train printed")
        return folder

    @classmethod
    def resume(cls, config: OrbitConfig) -> RunFolder:
        """The folder that run.resume names, with its config.yaml brought up to date.

        auto takes the newest unfinished run of the same config, or makes a new folder if there is none. Raises
        UserError if the run is still alive, or if model, quantization or adapter differ from what it was started with.
        """
        assert config.run.resume is not None, "there is nothing to resume"
        if config.run.resume == "auto":
            return find_resumable(config) or cls.create(config)
        folder = cls.open(config.run.resume)
        status = folder.status()
        if status is not None and status.alive and status.pid != os.getpid():
            raise UserError(
                f"run.resume={config.run.resume}: process {status.pid} is still running it; stop that first"
            )
        before, now = to_plain(folder.load_config()), to_plain(config)
        for section in FIXED_SECTIONS:
            changed = [key for key in now[section] if now[section][key] != before[section].get(key)]
            if changed:
                raise ConfigError(
                    f"run.resume={config.run.resume}: {section}.{changed[0]} was {before[section].get(changed[0])} and "
                    f"is now {now[section][changed[0]]}; a run cannot go on with another {section}"
                )
        folder._check_steps(config, status)
        write_atomic(folder.config, to_yaml(config))
        return folder

    def _check_steps(self, config: OrbitConfig, status: RunStatus | None) -> None:
        """Refuse to resume a run that has more steps than are asked for, or that is finished with as many."""
        done, asked = self.checkpoint_step(), config.trainer.steps
        finished = status is not None and status.state is RunState.finished
        if done > asked or (done == asked and finished):
            had = f"has {done} finished steps already" if done > asked else f"is finished after its {done} steps"
            raise ConfigError(
                f"run.resume={config.run.resume} trainer.steps={asked}: the run {had}; set trainer.steps above {done} "
                "to extend it, or leave out run.resume for a new run"
            )

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def replaced_adapters(self) -> Path:
        return self.path / "replaced_adapters"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def memory(self) -> Path:
        return self.path / "memory.json"

    @property
    def layers(self) -> Path:
        return self.path / "layers.json"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    @property
    def receipts(self) -> Path:
        return self.path / "receipts.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def wandb_id(self) -> Path:
        return self.path / "wandb_id"

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    @property
    def _status(self) -> Path:
        return self.path / "status.json"

    def adapter(self, version: int) -> Path:
        """Folder of an adapter version, whether or not it exists yet."""
        return self.adapters / f"{version:06d}"

    def latest_adapter(self) -> Path | None:
        """Folder of the newest adapter version that is complete (it has its adapter_config.json)."""
        return max(self._adapters(), key=lambda path: int(path.name), default=None)

    def _adapters(self) -> list[Path]:
        complete = [path.parent for path in self.adapters.glob("*/adapter_config.json")]
        return [path for path in complete if path.name.isdecimal()]

    def set_aside_adapters(self, version: int) -> None:
        """Training goes on after `version`: what later versions lie in adapters/ are no longer this run's."""
        for folder in self._adapters():
            if int(folder.name) > version:
                aside = self.replaced_adapters / folder.name
                shutil.rmtree(aside, ignore_errors=True)
                aside.parent.mkdir(exist_ok=True)
                folder.rename(aside)

    def latest_checkpoint(self) -> Path | None:
        """Folder of the newest complete checkpoint (trainer/checkpoint.py writes them)."""
        return max((path.parent for path in self.checkpoints.glob("step_*/meta.json")), default=None)

    def checkpoint_step(self) -> int:
        """Steps that the newest checkpoint holds; 0 without one."""
        newest = self.latest_checkpoint()
        return int(newest.name.removeprefix("step_")) if newest is not None else 0

    def load_config(self) -> OrbitConfig:
        """The resolved config. Raises ConfigError if it cannot be read."""
        return read_yaml(self.config)

    def set_status(self, state: RunState, error: str | None = None) -> None:
        write_json(self._status, {"state": state, "pid": os.getpid(), "error": error, "updated": _now()})

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep status.json true while a run goes on, and say at the end how it ended.

        Bad input, or a full disk, that shows before anything was recorded leaves no folder behind. Raises StorageError
        for whatever a library made of a full disk.
        """
        with self._locked():
            yield from self._running()

    def _running(self) -> Iterator[None]:
        self.set_status(RunState.running)
        try:
            yield
        except KeyboardInterrupt:
            self.set_status(RunState.interrupted)
            raise
        except BaseException as error:  # whatever it is, the folder must not go on saying "running"
            full = None if isinstance(error, UserError) else storage_error(error, self.path)
            if (full or isinstance(error, UserError)) and not self._holds_work():
                shutil.rmtree(self.path)
            else:
                self._failed(full or error)
            if full is not None:
                raise full from error
            raise
        self.set_status(RunState.finished)

    def _failed(self, error: BaseException) -> None:
        """set_status; on a full disk over the old status, which needs no room, and cut to the block that it has."""
        said = f"{type(error).__name__}: {error}"
        try:
            self.set_status(RunState.failed, said)
        except (OSError, StorageError):
            content = json.dumps({"state": "failed", "pid": os.getpid(), "error": said[:1000], "updated": _now()})
            with contextlib.suppress(OSError), open(self._status, "r+b") as file:
                file.write(content.encode())
                file.truncate()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time: the kernel keeps the lock, and frees it however the process ends."""
        with open(self._lock, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.path} is being run by another process; wait for it or stop it first") from None
            yield

    def _holds_work(self) -> bool:
        """Whether anything but the start was recorded: a step, an evaluation, rollouts, a checkpoint."""
        if any(row["kind"] != "sync" for row in read_rows(self.metrics)):
            return True
        start = {self.config, self._status, self._lock, self.engine_log, self.memory, self.receipts, self.metrics}
        return any(path.is_file() and path not in start and path.stat().st_size for path in self.path.rglob("*"))

    def status(self) -> RunStatus | None:
        """What the run last said of itself, or None for a folder without status.json."""
        found = read_json(self._status)
        if found is None:
            return None
        try:
            state = RunState(found["state"])
            datetime.fromisoformat(found["updated"])
            return RunStatus(state=state, pid=found["pid"], error=found["error"], updated=found["updated"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._status} is damaged ({error!r}); remove it") from error


def find_resumable(config: OrbitConfig, *, any_name: bool = False) -> RunFolder | None:
    """For run.resume=auto: the newest unfinished run below run.root with the same config (the run section apart),
    of run.name where that is set, unless `any_name` will do.

    A run whose process is still alive is not taken.
    """
    return _newest(config, lambda s: s.state is not RunState.finished and not s.alive, any_name=any_name)


def find_finished(config: OrbitConfig) -> RunFolder | None:
    """The newest finished run that `find_resumable` would take but for its fewer steps: one that could be extended."""
    return _newest(config, lambda status: status.state is RunState.finished, fewer_steps=True)


def _newest(
    config: OrbitConfig, fits: Callable[[RunStatus], bool], *, fewer_steps: bool = False, any_name: bool = False
) -> RunFolder | None:
    """The newest run below run.root of the same config and, where it is set, run.name whose status `fits`."""
    wanted = _comparable(config)
    steps = wanted["trainer"]["steps"]
    found = []
    for candidate in Path(config.run.root).expanduser().glob("*/config.yaml"):
        folder = RunFolder(candidate.parent.resolve())
        try:
            status = folder.status()
            if status is None or not fits(status):
                continue
            own = folder.load_config()
            plain = _comparable(own)
        except UserError:  # a damaged run, or one of an older schema, cannot be gone on with unseen
            continue
        if not any_name and config.run.name not in (None, own.run.name, folder.path.name):
            continue
        if fewer_steps and plain["trainer"]["steps"] < steps:
            plain["trainer"]["steps"] = steps
        elif fewer_steps:
            continue
        if plain == wanted:
            found.append((status.updated, folder))
    return max(found, key=lambda pair: pair[0], default=(None, None))[1]


def _comparable(config: OrbitConfig) -> dict[str, Any]:
    return {key: value for key, value in to_plain(config).items() if key != "run"}


def unique_name(stem: str) -> str:
    """`stem-20251129-171000-9f3c`: readable, sortable, and unlike any other made in the same second."""
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _claim(root: Path, config: OrbitConfig) -> Path:
    """Create the folder. A name that is taken gets a number (given names) or new random digits (made-up names)."""
    given = _safe(config.run.name) if config.run.name else None
    parts = (config.model.name, config.quantization.format, config.adapter.kind, config.environment.name)
    stem = "-".join(_safe(part)[:LONGEST_PART] for part in parts)
    for attempt in range(1, 10_000):
        name = unique_name(stem) if given is None else given if attempt == 1 else f"{given}-{attempt}"
        try:
            (root / name).mkdir()
        except FileExistsError:
            continue
        return (root / name).resolve()
    raise ConfigError(f"run.name={config.run.name}: 9999 folders of this name are there already; set another run.name")


def _safe(name: str) -> str:
    """One path component: no separators, not hidden, not empty."""
    return re.sub(r"[^\w.+=-]+", "_", name).strip(".") or "run"


def _started(pid: int) -> float:
    """When a process started, in seconds since the epoch; infinity if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # those after its name
    except OSError:
        return float("inf")
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="microseconds")
