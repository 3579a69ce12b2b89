"""A scheduler whose owner was killed before it could tie itself to it ends by itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import os, pathlib, sys, time
def scheduler(folder, orphaned):
    from orbit_cli.sglang_plugin.plugin import end_if_orphaned
    folder, parent = pathlib.Path(folder), os.getppid()
    (folder / "pid").write_text(str(os.getpid()))
    while orphaned and os.getppid() == parent:
        time.sleep(0.02)
    end_if_orphaned()
    (folder / "lives").write_text("")
"""
OWNER = """
import multiprocessing, sys
import child
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    process = multiprocessing.Process(target=child.scheduler, args=(sys.argv[1], sys.argv[2] == "orphaned"))
    process.start()
    process.join()
"""


def start(folder: Path, kind: str) -> subprocess.Popen:
    (folder / "child.py").write_text(CHILD)
    (folder / "owner.py").write_text(OWNER)
    return subprocess.Popen([sys.executable, str(folder / "owner.py"), str(folder), kind], cwd=folder)


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_orphan_ends(tmp_path: Path) -> None:
    owner = start(tmp_path, "orphaned")
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_for(lambda: ended(pid))
    assert not (tmp_path / "lives").exists()


def test_a_child_of_a_living_owner_goes_on(tmp_path: Path) -> None:
    assert start(tmp_path, "owned").wait(timeout=30) == 0
    assert (tmp_path / "lives").exists()
