"""What every test gets: W&B that never asks or calls home, and a working folder of its own."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before any import of wandb, transformers or torch: no test may reach for the network.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Test files run side by side, one for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def checkout() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """`with largest_file(size)`: a limit that stands in for a full disk, the same system calls fail."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: files are handed out in order, and a long one at the end would keep one core busy alone."""
    items.sort(key=lambda item: not {"e2e", "engine"} & set(item.path.parts))
