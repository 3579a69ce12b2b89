"""The installed command, run as a person would; a module of its own, because a conftest cannot be imported."""

import json
import subprocess
import sys
import time
from pathlib import Path

ORBIT = [sys.executable, "-m", "orbit_cli"]
SMALL = ["hardware.threads=1", "logging.console=plain", "engine.max_total_tokens=8192"]


class Orbit:
    """Runs commands below one folder."""

    def __init__(self, root: Path, bases: str) -> None:
        self.root, self.bases = root, bases

    def start(self, *arguments: str) -> subprocess.Popen:
        command, *rest = arguments
        overrides = [self.bases, f"run.root={self.root}", *SMALL] if command != "report" else []
        return subprocess.Popen(
            [*ORBIT, command, *rest, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=800)
        assert process.returncode == code, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-6000:]}"
        return out + err

    def figures(self, name: str) -> dict:
        return json.loads(self.run("report", str(self.root / name), "--json"))

    def rows(self, name: str, kind: str = "train") -> list[dict]:
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def wait_for_rows(self, name: str, count: int, process: subprocess.Popen, timeout: float = 240) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if (self.root / name / "metrics.jsonl").exists() and len(self.rows(name)) >= count:
                return
            assert process.poll() is None, process.communicate()[1][-4000:]
            time.sleep(0.1)
        raise AssertionError(f"no {count} steps within {timeout} s")
