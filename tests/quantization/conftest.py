"""The checkpoint that most tests of reading and converting start from."""

from pathlib import Path

import pytest
from made_up_checkpoints import moe_tensors, write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A bfloat16 checkpoint in three shards."""
    return write_checkpoint(tmp_path / "source", moe_tensors(), shards=3)
