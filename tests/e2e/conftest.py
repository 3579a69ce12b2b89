"""End-to-end tests run the installed command, as a person would, on tiny models through the real engine."""

import os
import signal
import subprocess

import pytest
from e2e_orbit import Orbit


@pytest.fixture(scope="session")
def bases(tmp_path_factory) -> str:
    """One cache of quantised bases for all end-to-end tests."""
    return f"quantization.cache_dir={tmp_path_factory.mktemp('bases')}"


@pytest.fixture
def orbit(tmp_path, bases) -> Orbit:
    return Orbit(tmp_path / "runs", bases)


@pytest.fixture
def kill_group():
    """Kill a process group by the given signal, and check afterwards that nothing of it is left."""

    def kill(process: subprocess.Popen, number: signal.Signals) -> None:
        os.killpg(process.pid, number)
        process.wait(timeout=120)

    return kill
