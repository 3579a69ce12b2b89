"""Routing tensors and tile lists against plain loops."""

import pytest
import torch
from kernel_device import DEVICE

from orbit_kernels.routing import RANKED_ROWS, route, row_tiles, row_tiles_reference


@pytest.mark.parametrize("tokens, slots, experts", [(37, 2, 5), (1, 8, 64), (64, 1, 3), (RANKED_ROWS // 2 + 1, 2, 7)])
def test_rows_are_sorted_by_expert_and_keep_token_order(tokens, slots, experts):
    ids = torch.randint(0, experts - 1, (tokens, slots)).to(DEVICE)  # the last expert stays empty
    routing = route(ids, experts)
    flat = ids.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert routing.order.tolist() == expected
    assert routing.position.flatten()[routing.order.long()].tolist() == list(range(len(flat)))
    assert routing.offsets.diff().tolist() == [flat.count(expert) for expert in range(experts)]
    assert (routing.rows, routing.experts) == (tokens * slots, experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [5, RANKED_ROWS])
def test_padding_comes_before_the_first_expert(tokens, dtype):
    ids = torch.randint(-1, 4, (tokens, 2), dtype=dtype).to(DEVICE)
    routing = route(ids, 4)
    flat = ids.flatten().tolist()
    assert routing.order.tolist() == sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert routing.offsets.tolist() == [sum(own < expert for own in flat) for expert in range(5)]


def test_lists_are_made_once_and_neighbouring_experts_join():
    ids = torch.tensor([[0, 5], [3, 1], [5, 2], [4, 4]]).to(DEVICE)
    routing = route(ids, 6)
    assert routing.tiles(16) is routing.tiles(16) and routing.of_every(1) is routing
    joined = routing.of_every(2)
    assert joined is routing.of_every(2) and joined.offsets.tolist() == [0, 2, 4, 8]
    tiles = joined.tiles(2)
    assert tiles.count.item() == 4 and tiles.expert[:4].tolist() == [0, 1, 2, 2] and tiles.start[2:4].tolist() == [4, 6]


@pytest.mark.parametrize("counts", [[0, 1, 31, 32, 33, 0], [100], [0, 0, 0], [1] * 40])
@pytest.mark.parametrize("size", [16, 32])
def test_tiles_cover_every_row_once(counts, size):
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    tiles = row_tiles(offsets.to(DEVICE), sum(counts), size)
    count = tiles.count.item()
    listed = list(zip(tiles.expert[:count].tolist(), tiles.start[:count].tolist(), strict=True))
    assert listed == row_tiles_reference(offsets, size)
