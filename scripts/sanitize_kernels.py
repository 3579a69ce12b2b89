#!/usr/bin/env python3
"""compute-sanitizer over small expert layers, and a verdict on what racecheck says of warp-specialised kernels.

    python scripts/sanitize_kernels.py            # on a GPU with compute-sanitizer on PATH; two minutes

Triton hands the warps of a specialised kernel their roles through a word of shared memory, between barriers that only
some warps pass. racecheck does not follow those and reports the word's writes (at `gl.warp_specialize`, and at the
kernel's own line, where the roles end) against its reads. Such pairs are counted and let pass; a race at any other
line, or any error of memcheck, fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASE = ROOT / "scripts" / "small_expert_layers.py"
ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+?):(\d+)")


def races(log: str, line_of: Callable[[str, int], str]) -> tuple[list[str], int]:
    """(reports that are real, how many are of roles alone) of racecheck's output; `line_of` gives a source line."""
    reports = re.split(r"(?m)^=+ (?=Error|Warning)", log)[1:]
    real = [report for report in reports if not _of_roles(report, line_of)]
    return real, len(reports) - len(real)


def _of_roles(report: str, line_of: Callable[[str, int], str]) -> bool:
    accesses = ACCESS.findall(report)
    lines = [(kernel, line_of(file, int(number))) for kernel, file, number in accesses]
    return bool(lines) and all("gl.warp_specialize(" in line or f"def {kernel}(" in line for kernel, line in lines)


def source_line(file: str, number: int) -> str:
    """Of our kernels; racecheck names files without folders. Empty for a line that is not there."""
    path = ROOT / "kernels" / "orbit_kernels" / Path(file).name
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, str(CASE), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def main() -> int:
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    plain = subprocess.run([sys.executable, str(CASE)], capture_output=True, text=True)  # compiles
    if plain.returncode:
        print(plain.stdout + plain.stderr)
        return plain.returncode
    memory = _run("memcheck")
    print(f"memcheck: {'clean' if memory.returncode == 0 else memory.stdout + memory.stderr}")
    shared = _run("racecheck", "--formats", "int4", "mxfp4")
    real, roles = races(shared.stdout, source_line)
    if shared.returncode not in (0, 9) or "RACECHECK SUMMARY" not in shared.stdout:
        print(f"racecheck did not end: {shared.stdout}{shared.stderr}")
        return 1
    print(f"racecheck: {len(real)} races, {roles} reports of Triton's hand-over of roles")
    print("".join(real), end="")
    return int(bool(memory.returncode or real))


if __name__ == "__main__":
    sys.exit(main())
