"""Gathering rows into expert order and summing them back, against PyTorch."""

import pytest
import torch
from kernel_device import DEVICE, relative_error, tolerance, values

from orbit_kernels.permute import (
    DISPATCHED_ROWS,
    combine_rows,
    combine_rows_reference,
    dispatch_rows,
    gather_rows,
    gather_rows_reference,
)
from orbit_kernels.routing import route, row_tiles_reference

TOKENS, SLOTS, EXPERTS, COLUMNS = 13, 3, 4, 96


def random_routing():
    ids = torch.stack([torch.randperm(EXPERTS)[:SLOTS] for _ in range(TOKENS)]).to(DEVICE)
    return route(ids, EXPERTS), torch.rand(TOKENS, SLOTS, device=DEVICE)


@pytest.mark.parametrize("in_order", [False, True])
def test_gather(in_order):
    routing, _ = random_routing()
    x = values(TOKENS, COLUMNS)
    assert torch.equal(gather_rows(x, routing, in_order), gather_rows_reference(x, routing, in_order))


@pytest.mark.parametrize("tokens, size", [(1, 8), (9, 16), (10, 8), (DISPATCHED_ROWS, 32)])
@pytest.mark.parametrize("in_order", [False, True])
def test_dispatch_is_route_and_gather(tokens, size, in_order):
    """On either side of the bound of rows, with padding and with experts of several tiles and of none."""
    ids = torch.randint(-1, EXPERTS - 1, (tokens, SLOTS), dtype=torch.int32)
    ids[tokens // 2 :] = 1
    ids = ids.to(DEVICE)
    x = values(tokens, COLUMNS)
    routing, rows = dispatch_rows(x, ids, EXPERTS, size, in_order)
    expected = route(ids, EXPERTS)
    for name in ("order", "position", "offsets"):
        assert torch.equal(getattr(routing, name), getattr(expected, name))
    assert torch.equal(rows, gather_rows_reference(x, expected, in_order))
    tiles, count = routing.tiles(size), routing.tiles(size).count.item()
    listed = list(zip(tiles.expert[:count].tolist(), tiles.start[:count].tolist(), strict=True))
    assert tiles.size == size and listed == row_tiles_reference(expected.offsets, size)


@pytest.mark.parametrize("weighted", [False, True])
def test_combine(weighted):
    routing, weights = random_routing()
    rows = values(TOKENS * SLOTS, COLUMNS)
    weights = weights if weighted else None
    y = combine_rows(rows, routing, weights)
    assert relative_error(y, combine_rows_reference(rows.double(), routing, weights)) < tolerance()


def test_gather_and_combine_are_adjoint():
    routing, _ = random_routing()
    x, rows = values(TOKENS, COLUMNS), values(TOKENS * SLOTS, COLUMNS)
    left = (gather_rows(x, routing).double() * rows.double()).sum()
    right = (x.double() * combine_rows(rows, routing).double()).sum()
    assert abs(left - right) < tolerance(2) * x.double().norm() * rows.double().norm()
