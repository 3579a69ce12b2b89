"""Per-expert rotations and their gradients against autograd through PyTorch in float64."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED, relative_error, tolerance, values

from orbit_kernels.rotation import rotate_back, rotate_rows, rotate_rows_reference
from orbit_kernels.routing import route

TOKENS, SLOTS, EXPERTS = (9, 2, 3) if INTERPRETED else (190, 2, 3)


def random_case(block: int, columns: int, count: int):
    """Expert 1 gets no token."""
    ids = torch.stack([torch.tensor([0, 2])[torch.randperm(2)] for _ in range(TOKENS)]).to(DEVICE)
    rotations = [
        torch.linalg.qr(torch.randn(EXPERTS, columns // block, block, block))[0].to(DTYPE).to(DEVICE)
        for _ in range(count)
    ]
    return route(ids, EXPERTS), rotations


@pytest.mark.parametrize("block, columns", [(16, 96), (32, 160), (64, 128)])
@pytest.mark.parametrize("count, gather", [(1, False), (2, True)])
def test_values_and_gradients(block, columns, count, gather):
    routing, rotations = random_case(block, columns, count)
    x = values(TOKENS if gather else TOKENS * SLOTS, columns)
    y = rotate_rows(x, rotations, routing, gather=gather)
    wide, turns = x.double().requires_grad_(), [r.double().requires_grad_() for r in rotations]
    expected = rotate_rows_reference(wide, turns, routing, gather)
    assert relative_error(y, expected.detach()) < tolerance()
    dy = values(count, TOKENS * SLOTS, columns)
    dx, slopes = rotate_back(x, dy, rotations, routing, gather)
    rows = x[routing.order.long() // SLOTS] if gather else x  # dx is in expert order
    own = rows.double().requires_grad_()
    wanted = torch.autograd.grad(rotate_rows_reference(own, turns, routing), [own, *turns], dy.double())
    for actual, exact in zip([dx, *slopes], wanted, strict=True):
        assert relative_error(actual, exact) < tolerance()
    assert all((slope[1] == 0).all() for slope in slopes)


def test_the_order_of_columns_that_products_read():
    routing, rotations = random_case(32, 96, 1)
    x = values(TOKENS * SLOTS, 96)
    y = rotate_rows(x, rotations, routing, in_order=True)
    assert (
        relative_error(y, rotate_rows_reference(x.double(), [rotations[0].double()], routing, False, True))
        < tolerance()
    )
