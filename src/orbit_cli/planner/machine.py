"""What this machine has, asked without loading anything: memory of the host, and how many GPUs there are."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def visible_gpus() -> int | None:
    """NVIDIA GPUs that a process here may use; None where that cannot be told without the driver."""
    if Path("/dev/dxg").exists():  # Windows' subsystem for Linux has other device files
        return None
    found = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return found
    return min(found, len([word for word in allowed.split(",") if word.strip() not in ("", "-1")]))
