"""How much memory this machine has, and what machines conf/hardware knows."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

from orbit_cli.config.locate import conf_dir, group_options
from orbit_cli.config.schema.system import Device, HardwareConfig

_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int | None:
    """Bytes of memory of this machine, or of the container if that is less; None where Linux does not say."""
    try:
        total = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None
    for path in _CGROUP:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


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
