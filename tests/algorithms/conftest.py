"""The golden numbers of the RL formulas: computed once, outside this package, and kept in golden.json (6 decimals)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.fixture
def rng() -> torch.Generator:
    seed = torch.seed() % 2**31
    print(f"seed of this test's random inputs: {seed}")
    return torch.Generator().manual_seed(seed)
