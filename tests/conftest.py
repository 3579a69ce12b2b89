"""What every test gets: W&B that never asks or calls home, and a working folder of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before any import of wandb or transformers: no test may reach for the network.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def checkout() -> Path:
    """Root of the checkout."""
    return ROOT
