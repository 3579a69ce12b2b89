"""Tests of Triton kernels (device/) run natively on a GPU, else in a process of their own under the interpreter.

Triton decides between the two when it is first imported, so one process can do one of them: test_interpreted.py starts
the other. `TRITON_INTERPRET=1 pytest tests/kernels/device` runs them directly.
"""

import os

import torch

collect_ignore = [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else ["device"]
