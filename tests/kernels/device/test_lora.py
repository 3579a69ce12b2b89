"""The three low-rank products against autograd through PyTorch in float64."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED, relative_error, tolerance, values

from orbit_kernels.lora import expand, outer, project, project_reference
from orbit_kernels.routing import route

TOKENS, SLOTS, EXPERTS, COLUMNS, RANK = (9, 2, 3, 96, 4) if INTERPRETED else (190, 2, 3, 320, 16)


@pytest.mark.parametrize("gather", [False, True])
def test_project_expand_and_outer(gather):
    ids = torch.stack([torch.tensor([0, 2])[torch.randperm(2)] for _ in range(TOKENS)]).to(DEVICE)
    routing = route(ids, EXPERTS)  # expert 1 gets no token
    x = values(TOKENS if gather else TOKENS * SLOTS, COLUMNS)
    matrix = values(EXPERTS, RANK, COLUMNS).transpose(1, 2)  # a view, as the layer gives it
    low = project(x, matrix, routing, gather, scaling=0.5)
    rows = (x[routing.order.long() // SLOTS] if gather else x).double().requires_grad_()
    wide = matrix.double().requires_grad_()
    expected = 0.5 * project_reference(rows, wide, routing)
    assert relative_error(low, expected.detach()) < tolerance()

    slope = values(TOKENS * SLOTS, RANK)
    d_rows, d_matrix = torch.autograd.grad(expected, [rows, wide], slope.double())
    start = values(TOKENS * SLOTS, COLUMNS)
    total = start.clone()
    expand(slope, matrix.transpose(1, 2), routing, total, scaling=0.5)
    assert relative_error(total, start.double() + d_rows) < tolerance()
    for transpose in (False, True):
        found = outer(x, slope, routing, DTYPE, gather, scaling=0.5, transpose=transpose)
        found = found.transpose(1, 2) if transpose else found
        assert relative_error(found, d_matrix) < tolerance()
        assert (found[1] == 0).all()


def test_strided_halves():
    """Gate and up are halves of one matrix."""
    routing = route(torch.zeros(TOKENS, 1, dtype=torch.long, device=DEVICE), 1)
    h, matrix = values(TOKENS, 2 * COLUMNS), values(1, RANK, COLUMNS)
    half, before = h.chunk(2, 1)[1], h.clone()
    low = project(half, matrix.transpose(1, 2), routing)
    assert relative_error(low, half.double() @ matrix[0].double().T) < tolerance()
    expand(low, matrix, routing, half)
    assert torch.equal(h[:, :COLUMNS], before[:, :COLUMNS])
    assert relative_error(half, before[:, COLUMNS:].double() + low.double() @ matrix[0].double()) < tolerance()
