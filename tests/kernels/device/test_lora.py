"""The low-rank products against autograd through PyTorch in float64."""

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, relative_error, tolerance, values

from orbit_kernels.fragments import fragment_order
from orbit_kernels.lora import expand, outer, padded, padded_rank, project, project_reference
from orbit_kernels.routing import route, row_tiles

TOKENS, SLOTS, EXPERTS, COLUMNS = (9, 2, 3, 96) if INTERPRETED else (190, 2, 3, 1120)
ROWS = TOKENS * SLOTS
RANKS = [16] if INTERPRETED else [16, 32, 64, 128]


def random_rows():
    """(routing, tiles, weights); expert 1 gets no token."""
    ids = torch.stack([torch.tensor([0, 2])[torch.randperm(2)] for _ in range(TOKENS)]).to(DEVICE)
    routing = route(ids, EXPERTS)
    return routing, row_tiles(routing.offsets, ROWS, 64), torch.rand(ROWS, device=DEVICE)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("gather", [False, True])
def test_project_expand_and_outer(gather, rank):
    routing, tiles, weights = random_rows()
    x = values(TOKENS if gather else ROWS, COLUMNS)
    matrices = [values(EXPERTS, rank, COLUMNS) for _ in range(2)]
    kept = torch.full((ROWS, COLUMNS), torch.nan, dtype=x.dtype, device=DEVICE)
    low = project(x, matrices, [0.5, 2.0], routing, tiles, gather=gather, out=kept, in_order=True)
    rows = x[routing.order.long() // SLOTS] if gather else x
    assert torch.equal(kept, rows[:, fragment_order(COLUMNS, DEVICE)])
    wide, exact = rows.double().requires_grad_(), [m.double().requires_grad_() for m in matrices]
    expected = [s * project_reference(wide, m.transpose(1, 2), routing) for s, m in zip([0.5, 2.0], exact, strict=True)]
    assert relative_error(low, torch.cat(expected, 1).detach()) < tolerance()
    turned = matrices[0].transpose(1, 2).contiguous()
    again = project(x, [turned], [0.5], routing, tiles, gather=gather, transposed=True)
    assert relative_error(again, low[:, :rank]) < tolerance()

    slope = values(ROWS, 2 * rank)
    d_rows, *d_matrices = torch.autograd.grad(expected, [wide, *exact], slope.double().chunk(2, 1))
    start = values(ROWS, COLUMNS)
    total = start.clone()
    expand(slope[:, :rank], 0.5 * matrices[0], routing, total, tiles)
    expand(slope[:, rank:], 2.0 * matrices[1], routing, total, tiles)
    assert relative_error(total, start.double() + d_rows) < tolerance(2)
    found = outer(x, slope, routing, [m.shape for m in matrices], x.dtype, gather=gather, transpose=True)
    for actual, exact_slope, scaling in zip(found, d_matrices, [0.5, 2.0], strict=True):
        assert relative_error(scaling * actual, exact_slope) < tolerance()
        assert (actual[1] == 0).all()
    factor = weights.double().unsqueeze(1)
    shape = torch.Size((EXPERTS, COLUMNS, rank - 3))  # a rank that was padded
    (found,) = outer(x, slope[:, :rank].contiguous(), routing, [shape], torch.float32, gather=gather, weights=weights)
    wanted = torch.autograd.grad(
        project_reference(rows.double(), exact[0].transpose(1, 2), routing), exact[0], slope[:, :rank].double() * factor
    )[0].transpose(1, 2)
    assert relative_error(found, wanted[..., :-3]) < tolerance(2)


def test_a_rank_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="rank 129.*at most 128"):
        padded_rank(8, 129)


def test_padding_keeps_the_matrix():
    for dim in (1, 2):
        matrix = values(2, 5, 5)
        wide = padded(matrix, dim, 16)
        assert wide.shape[dim] == 16 and torch.equal(wide[:, :5, :5], matrix) and wide.sum() - matrix.sum() < 1e-2


def test_halves_and_columns_in_fragment_order():
    """Gate and up are halves of one matrix; what SwiGLU wrote for the product is read as it is."""
    routing, tiles, _ = random_rows()
    rank = RANKS[-1]
    h, low = values(ROWS, 2 * COLUMNS), values(ROWS, 2 * rank)
    pair = [values(EXPERTS, COLUMNS, rank) for _ in range(2)]
    found = project(h, pair, [0.5, 2.0], routing, tiles, wide_parts=True, transposed=True)
    parts = zip([0.5, 2.0], h.chunk(2, 1), pair, strict=True)
    wanted = [s * project_reference(own.double(), m.double(), routing) for s, own, m in parts]
    assert relative_error(found, torch.cat(wanted, 1)) < tolerance()
    slopes = outer(h, low, routing, [m.shape for m in pair], h.dtype, wide_parts=True)
    for actual, own, narrow in zip(slopes, h.chunk(2, 1), low.chunk(2, 1), strict=True):
        exact = torch.zeros(EXPERTS, COLUMNS, rank, dtype=torch.float64, device=DEVICE, requires_grad=True)
        wanted = torch.autograd.grad(project_reference(own.double(), exact, routing), exact, narrow.double())[0]
        assert relative_error(actual, wanted) < tolerance()

    a, matrix = values(ROWS, COLUMNS), values(EXPERTS, rank, COLUMNS)
    stored = a[:, fragment_order(COLUMNS, DEVICE)].contiguous()
    found = project(stored, [matrix], [1.0], routing, tiles, ordered=True)
    wanted = project_reference(a.double(), matrix.double().transpose(1, 2), routing)
    assert relative_error(found, wanted) < tolerance()
