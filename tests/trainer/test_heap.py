"""Freed blocks below glibc's threshold stay in its heap until they are asked back."""

import torch

from orbit_cli.telemetry.memory import rss_gib
from orbit_cli.trainer.heap import return_memory


def test_freed_blocks_go_back_to_the_system():
    blocks = [torch.ones(16 * 1024) for _ in range(4096)]  # 64 KiB each: 256 MiB in the heap, not mapped one by one
    kept = blocks[::512]  # what lives on holds the heap's top, so that nothing is returned by itself
    full = rss_gib()
    del blocks
    before = rss_gib()
    return_memory(torch.device("cpu"))
    assert before > full - 0.1, "the system had it back already; this test shows nothing"
    assert rss_gib() < full - 0.15
    assert all(float(block[0]) == 1 for block in kept)
