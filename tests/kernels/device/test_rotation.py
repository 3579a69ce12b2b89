"""Per-expert rotations and their gradients against autograd through PyTorch in float64."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED, relative_error, tolerance, values

from orbit_kernels import rotation
from orbit_kernels.rotation import (
    rotate_back,
    rotate_hidden,
    rotate_hidden_back,
    rotate_rows,
    rotate_rows_reference,
    slabs,
)
from orbit_kernels.routing import route, row_tiles
from orbit_kernels.swiglu import swiglu_reference

TOKENS, SLOTS, EXPERTS = (9, 2, 3) if INTERPRETED else (190, 2, 3)


def random_case(block: int, columns: int, count: int):
    """Expert 1 gets no token."""
    ids = torch.stack([torch.tensor([0, 2])[torch.randperm(2)] for _ in range(TOKENS)]).to(DEVICE)
    rotations = [
        torch.linalg.qr(torch.randn(EXPERTS, columns // block, block, block))[0].to(DTYPE).to(DEVICE)
        for _ in range(count)
    ]
    routing = route(ids, EXPERTS)
    return routing, rotations, row_tiles(routing.offsets, TOKENS * SLOTS, 64)


@pytest.mark.parametrize("block, columns", [(16, 96), (32, 160), (64, 128), (128, 128)])
@pytest.mark.parametrize("count, gather", [(1, False), (2, True)])
def test_values_and_gradients(block, columns, count, gather):
    routing, rotations, tiles = random_case(block, columns, count)
    x = values(TOKENS if gather else TOKENS * SLOTS, columns)
    y = rotate_rows(x, rotations, routing, tiles, gather=gather)
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


@pytest.mark.parametrize("block", [16, 32, 64])
def test_no_bit_depends_on_how_many_rows_there_are(block, monkeypatch):
    """Crowded experts take other tiles and another form of matrix unit."""
    columns = 256
    routing, rotations, tiles = random_case(block, columns, 2)
    x, dy = values(TOKENS, columns), values(2, TOKENS * SLOTS, columns)
    found = []
    for crowded in (False, True):
        monkeypatch.setattr(rotation, "_crowded", lambda routing, crowded=crowded: crowded)
        dx, slopes = rotation.rotate_back(x, dy, rotations, routing, gather=True)
        found.append([rotate_rows(x, rotations, routing, tiles, gather=True, in_order=True), dx, *slopes])
    for few, many in zip(*found, strict=True):  # numpy chooses the order of summation by the shape
        assert relative_error(few, many) < tolerance() if INTERPRETED else torch.equal(few, many)


@pytest.mark.parametrize("block", [48, 256])
def test_blocks_without_a_kernel_are_refused(block):
    routing, rotations, tiles = random_case(block, 2 * block, 1)
    with pytest.raises(ValueError, match=f"blocks of {block}.*power of two"):
        rotate_rows(values(TOKENS * SLOTS, 2 * block), rotations, routing, tiles)


def test_two_sizes_of_blocks_for_the_same_rows_are_refused():
    routing, (gate,), tiles = random_case(16, 64, 1)
    _, (up,), _ = random_case(32, 64, 1)
    with pytest.raises(ValueError, match="blocks of 16 and of 32.*one size"):
        rotate_rows(values(TOKENS * SLOTS, 64), [gate, up], routing, tiles)


def test_the_order_of_columns_that_products_read():
    routing, rotations, tiles = random_case(32, 96, 1)
    x = values(TOKENS * SLOTS, 96)
    y = rotate_rows(x, rotations, routing, tiles, in_order=True)
    assert (
        relative_error(y, rotate_rows_reference(x.double(), [rotations[0].double()], routing, False, True))
        < tolerance()
    )


@pytest.mark.parametrize("block, columns, limit", [(32, 96, None), (128, 128, 0.7)])
def test_swiglu_on_the_way(block, columns, limit):
    routing, (turn,), tiles = random_case(block, columns, 1)
    rows = TOKENS * SLOTS
    h, da, weights = values(rows, 2 * columns), values(rows, columns), torch.rand(rows, device=DEVICE)
    wide, exact = h.double().requires_grad_(), turn.double().requires_grad_()
    a = swiglu_reference(wide, limit)
    for in_order in (False, True):
        expected = rotate_rows_reference(a, [exact], routing, in_order=in_order)[0]
        assert relative_error(rotate_hidden(h, turn, routing, tiles, limit, in_order), expected.detach()) < tolerance(2)
    dots = torch.full((slabs(columns, block), rows), torch.nan, device=DEVICE)
    dh, slope = rotate_hidden_back(h, da, turn, routing, weights, limit, dots)
    expected = rotate_rows_reference(a, [exact], routing)[0]
    wanted = torch.autograd.grad(expected, [wide, exact], da.double() * weights.double().unsqueeze(1))
    assert relative_error(dh, wanted[0]) < tolerance(2)
    assert relative_error(slope, wanted[1]) < tolerance(2)
    assert relative_error(dots.sum(0), (expected.detach() * da.double()).sum(1)) < tolerance(2)
