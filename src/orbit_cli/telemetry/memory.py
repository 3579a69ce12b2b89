"""Peak memory by phase: of this process, of its children (the engine), and of the GPU where there is one; and beside it
what was planned.

Linux: the process's peak (VmHWM) is reset at the start of each phase by writing to /proc/self/clear_refs; where that is
not allowed the peak since start is recorded, and said so. Never imports torch: it looks at torch only if it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orbit_cli.telemetry.files import read_json, write_json

GIB = 1 << 30
NOTICEABLE_GIB = 1 / 1024
ENGINE_COLUMNS = {"allocated": "cuda0_engine_gib", "reserved": "cuda0_engine_reserved_gib"}


class MemoryRecorder:
    """Keeps the largest peak seen in each phase and writes memory.json whenever one grew.

    >>> with MemoryRecorder(folder.memory).phase("rollout"):
    ...     pass
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        earlier = read_json(path) or {}  # of the run that is resumed
        self._phases: dict[str, dict[str, float]] = earlier.get("phases", {})
        self._planned: dict[str, Any] = {"phases": {}, "parts": {}}
        self._held: dict[str, int] = {}
        self._engine: Callable[[], dict[str, int]] | None = None
        self._resettable = True

    def planned(self, peaks: dict[str, Any] | None) -> None:
        """What was predicted: {"phases": {phase: {column: GiB}}, "parts": {part: bytes}, "about": text}, or nothing."""
        if peaks is not None:
            self._planned = peaks

    def held(self, parts: dict[str, int]) -> None:
        """Bytes that the trainer's base, adapter and gradients take, counted exactly."""
        self._held = parts

    def engine(self, gpu_memory: Callable[[], dict[str, int]]) -> None:
        """How to ask the engine for its share of the GPU (`RolloutEngine.gpu_memory`)."""
        self._engine = gpu_memory

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase; peaks of repeated phases are joined by their maximum.

        An engine is asked at the end of a phase that went well: after another it may be gone.
        """
        self._reset()
        seen: dict[str, float] = {}
        try:
            yield
            if self._engine is not None:
                seen = {ENGINE_COLUMNS[name]: nbytes / GIB for name, nbytes in self._engine().items()}
        finally:
            self._join(name, peaks() | seen)

    def _reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not Linux, or a sandbox that forbids it
            self._resettable = False
        cuda = _cuda()
        if cuda is not None:
            for device in range(cuda.device_count()):
                cuda.reset_peak_memory_stats(device)

    def _join(self, name: str, seen: dict[str, float]) -> None:
        kept = self._phases.setdefault(name, {})
        grown = {key: value for key, value in seen.items() if value > kept.get(key, -1.0) + NOTICEABLE_GIB}
        kept |= grown
        if grown:  # a phase runs every few seconds; the file is written when there is something new in it
            self._write()

    def _write(self) -> None:
        kind = "peak in the phase" if self._resettable else "peak since the process started"
        record: dict[str, Any] = {"process_gib_is": kind, "phases": self._phases}
        if self._planned["phases"]:
            record["planned"] = {
                name: {key: beside(planned, self._phases[name].get(key)) for key, planned in columns.items()}
                for name, columns in self._planned["phases"].items()
                if name in self._phases
            }
            record["parts"] = {
                name: beside(nbytes / GIB, self._held[name] / GIB if name in self._held else None)
                for name, nbytes in self._planned["parts"].items()
            }
            record["about"] = self._planned.get("about", "")
        write_json(self._path, record)


def beside(planned_gib: float, measured_gib: float | None) -> dict[str, float | None]:
    """A planned figure, the measured one, and how far the plan is off it in percent (above 0: planned too much)."""
    off = None if not measured_gib else 100 * (planned_gib - measured_gib) / measured_gib
    return {"planned_gib": planned_gib, "measured_gib": measured_gib, "off_percent": off}


def peaks() -> dict[str, float]:
    """Peaks now, in GiB: process, children (sum of their resident memory), and of each GPU what this process allocated,
    what it reserved, and what all processes use at this moment."""
    seen = {"process_gib": _status_gib("self", "VmHWM"), "children_gib": children_gib()}
    cuda = _cuda()
    if cuda is not None:
        for device in range(cuda.device_count()):
            free, total = cuda.mem_get_info(device)
            seen[f"cuda{device}_gib"] = cuda.max_memory_allocated(device) / GIB
            seen[f"cuda{device}_reserved_gib"] = cuda.max_memory_reserved(device) / GIB
            seen[f"cuda{device}_used_gib"] = (total - free) / GIB
    return seen


def column_words(column: str) -> str:
    """What a column of the record is, for people.

    >>> column_words("cuda0_used_gib")
    'GPU 0, all that is in use'
    """
    name = column.removesuffix("_gib")
    device, _, kind = name.removeprefix("cuda").partition("_")
    gpu = {
        "": "trainer's tensors",
        "reserved": "kept by the trainer's allocator",
        "engine": "engine's tensors",
        "engine_reserved": "kept by the engine's allocator",
        "used": "all that is in use",
    }
    return (
        f"GPU {device}, {gpu[kind]}" if name.startswith("cuda") else {"process": "trainer", "children": "engine"}[name]
    )


def rss_gib() -> float:
    """Resident memory now of this process and its children, in GiB (shared pages are counted in each)."""
    return _status_gib("self", "VmRSS") + children_gib()


def children_gib() -> float:
    """Resident memory of all descendants of this process, in GiB."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    total, waiting = 0.0, list(parents.get(_own_pid(), []))
    while waiting:
        pid = waiting.pop()
        total += _status_gib(str(pid), "VmRSS")
        waiting += parents.get(pid, [])
    return total


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name) if Path("/proc/self").exists() else -1


def _status_gib(process: str, key: str) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it ended, or this is not Linux
        return 0.0
    found = next((line for line in lines if line.startswith(f"{key}:")), None)
    return int(found.split()[1]) * 1024 / GIB if found else 0.0


def _cuda() -> Any | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda
