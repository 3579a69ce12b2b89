"""Gathering rows into expert order and summing them back, against PyTorch."""

import pytest
import torch
from kernel_device import DEVICE, relative_error, tolerance, values

from orbit_kernels.permute import combine_rows, combine_rows_reference, gather_rows, gather_rows_reference
from orbit_kernels.routing import route

TOKENS, SLOTS, EXPERTS, COLUMNS = 13, 3, 4, 96


def random_routing():
    ids = torch.stack([torch.randperm(EXPERTS)[:SLOTS] for _ in range(TOKENS)]).to(DEVICE)
    return route(ids, EXPERTS), torch.rand(TOKENS, SLOTS, device=DEVICE)


@pytest.mark.parametrize("in_order", [False, True])
def test_gather(in_order):
    routing, _ = random_routing()
    x = values(TOKENS, COLUMNS)
    assert torch.equal(gather_rows(x, routing, in_order), gather_rows_reference(x, routing, in_order))


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
