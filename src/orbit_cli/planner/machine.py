"""How much memory this machine has, and what machines conf/hardware knows."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from orbit_cli.config.locate import conf_dir, group_options
from orbit_cli.config.schema.system import Device, HardwareConfig

TORCH_MAPS = 3 * 10**9  # bytes of address space that `import torch` takes: 3.2 GB with the pinned 2.11.0, rounded down


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory of this machine, or of the container or control group if that is less; None where Linux does
    not say."""
    try:
        total = int(re.search(r"MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None
    for path in _group_files(root):
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _group_files(root: Path) -> Iterator[Path]:
    """Where the limits of this process's control group and of those around it are, in both versions of Linux's groups;
    inside a container the outermost is the container's own."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = {kind: path for _, kind, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    for kind, mount, name in (("", "", "memory.max"), ("memory", "memory", "memory.limit_in_bytes")):
        top = root / "sys/fs/cgroup" / mount
        own = top / groups.get(kind, "/").strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top):
                yield folder / name


def address_space() -> int | None:
    """Bytes that this process may map (`ulimit -v`, prlimit --as); None if that is not limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


@cache
def gpu_machines() -> tuple[tuple[str, HardwareConfig], ...]:
    """The GPU machines of conf/hardware, by their whole memory; files that only rename another are left out."""
    found = []
    for name in group_options("hardware"):
        values = yaml.safe_load((conf_dir() / "hardware" / f"{name}.yaml").read_text(encoding="utf-8"))
        if values.get("device") == "cuda" and values.get("memory_mib"):
            found.append((name, HardwareConfig(**values | {"device": Device.cuda})))
    return tuple(sorted(found, key=lambda pair: whole_memory(pair[1])))


@cache
def machine_of(name: str) -> HardwareConfig | None:
    """What the file of conf/hardware says that gives this name; None where there is none."""
    for option in group_options("hardware"):
        values = yaml.safe_load((conf_dir() / "hardware" / f"{option}.yaml").read_text(encoding="utf-8"))
        if values.get("name") == name and "device" in values:
            return HardwareConfig(**values | {"device": Device(values["device"])})
    return None


def whole_memory(hardware: HardwareConfig) -> int:
    """Bytes of all GPUs together; 0 if unknown."""
    return (hardware.memory_mib or 0) * (1 << 20) * max(hardware.gpus, 1)
