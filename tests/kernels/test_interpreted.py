"""The kernels' own tests under Triton's interpreter, on a CPU, in a process of their own (see conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_kernels_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parent / "device")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
