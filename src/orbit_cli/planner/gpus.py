"""Which NVIDIA GPUs a process here may use, and their memory, asked without torch and without the driver's libraries.

nvidia-smi is asked in a process of its own, which is given up after some seconds; where it is missing or does not
answer, the device files are counted. CUDA_VISIBLE_DEVICES is read as CUDA and torch read it. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

QUERY = ("nvidia-smi", "--query-gpu=uuid,memory.total,memory.used,mig.mode.current", "--format=csv,noheader,nounits")
PATIENCE_S = 15.0  # a driver without persistence wakes each GPU first


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU; None for what cannot be told."""

    uuid: str | None = None
    total_mib: int | None = None
    used_mib: int | None = None  # by whatever runs there now
    split: bool = False  # in MIG mode: a process sees one instance of it, whose memory is not told here

    @property
    def free_mib(self) -> int | None:
        return None if self.total_mib is None or self.used_mib is None else self.total_mib - self.used_mib


def usable_gpus(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> list[Gpu] | None:
    """The GPUs of this machine that CUDA would show, in its order; None where that cannot be told."""
    environment = os.environ if environment is None else environment
    found = _listed(environment) or _device_files(root)
    if not found and (root / "dev/dxg").exists():  # Windows' subsystem for Linux has other device files
        return None
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return _chosen(chosen, found)
    whole = [gpu for gpu in found if not gpu.split]
    return whole or found[:1]  # of GPUs in MIG mode CUDA shows one instance


def _listed(environment: Mapping[str, str]) -> list[Gpu]:
    """What nvidia-smi says; nothing if it is not there, fails or takes too long."""
    try:
        process = subprocess.Popen(
            QUERY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(environment)
        )
    except OSError:
        return []
    try:
        text, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            process.kill()  # not waited for: a process inside a driver that hangs does not end
            process.stdout.close()
        return []
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if process.returncode or any(len(row) != 4 for row in rows):
        return []
    return [
        Gpu(uuid=uuid, split=True)
        if mode == "Enabled"
        else Gpu(uuid=uuid, total_mib=_number(total), used_mib=_number(used))
        for uuid, total, used, mode in rows
    ]


def _number(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None  # "[N/A]"


def _device_files(root: Path) -> list[Gpu]:
    """One for each /dev/nvidiaN, whatever N: a container may be given the last GPU alone."""
    try:
        files = [path.name for path in (root / "dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
        split = any((root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*"))
    except OSError:
        return []
    return [Gpu(split=split)] * len(files)


def _chosen(text: str, found: list[Gpu]) -> list[Gpu]:
    """CUDA_VISIBLE_DEVICES: numbers or UUIDs (their beginnings are enough), up to the first that is none of these GPUs;
    one that is named twice leaves none at all."""
    chosen: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        if word.startswith("MIG-"):
            return [Gpu(split=True)] if found and not chosen else []  # one instance is all that a process can have
        number = _by_uuid(word, found, len(chosen)) if word.startswith("GPU-") else _by_number(word, found)
        if number is None:
            break
        if number in chosen:
            return []
        chosen.append(number)
    return [found[number] for number in chosen]


def _by_number(word: str, found: list[Gpu]) -> int | None:
    digits = re.match(r"\d+", word)
    return int(digits[0]) if digits and int(digits[0]) < len(found) else None


def _by_uuid(word: str, found: list[Gpu], before: int) -> int | None:
    if all(gpu.uuid is None for gpu in found):  # device files carry none: the next is believed to be meant
        return before if before < len(found) else None
    matching = [number for number, gpu in enumerate(found) if (gpu.uuid or "").startswith(word)]
    return matching[0] if len(matching) == 1 else None
