"""One pass over an expert's rows against the kernels that it joins, and against autograd in float64."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED, relative_error, tolerance, values
from test_lora import COLUMNS, EXPERTS, ROWS, SLOTS, TOKENS, random_rows

from orbit_kernels.fragments import fragment_order
from orbit_kernels.lora import project, project_reference
from orbit_kernels.lora_sweep import sweep


def outer_reference(rows, low, shape, routing):
    """Sum of rows^T low over an expert's rows, [E, K, r]."""
    exact = torch.zeros(shape, dtype=torch.float64, device=DEVICE, requires_grad=True)
    return torch.autograd.grad(project_reference(rows, exact, routing), exact, low)[0]


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
@pytest.mark.parametrize("rank", [16, 32])
def test_a_projection_and_its_gradient_of_gathered_rows(rank, dtype):
    routing, _, weights = random_rows()
    dy, low, matrix = values(TOKENS, COLUMNS), values(ROWS, rank), values(EXPERTS, COLUMNS, rank)
    shape = torch.Size((EXPERTS, COLUMNS, rank - 3))  # a rank that was padded
    found = []
    for _ in range(2):
        kept = torch.full((ROWS, COLUMNS), torch.nan, dtype=dy.dtype, device=DEVICE)
        dlow, (slope,) = sweep(
            dy, [matrix.to(dtype)], [0.5], routing, gather=True, transposed=True, out=kept,
            low=low, shapes=[shape], dtype=dtype, weights=weights,
        )  # fmt: skip
        found.append((kept, dlow, slope))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    rows = dy[routing.order.long() // SLOTS]
    assert torch.equal(kept, rows)
    assert relative_error(dlow, 0.5 * project_reference(rows.double(), matrix.double(), routing)) < tolerance()
    wanted = outer_reference(rows.double(), low.double() * weights.double().unsqueeze(1), matrix.shape, routing)
    assert slope.dtype == dtype and slope.shape == shape
    assert relative_error(slope, wanted[..., :-3]) < tolerance(2)
    assert (slope[1] == 0).all()


def test_halves_of_one_matrix():
    routing, _, _ = random_rows()
    dh, low = values(ROWS, 2 * COLUMNS), values(ROWS, 32)
    pair = [values(EXPERTS, COLUMNS, 16) for _ in range(2)]
    shapes = [torch.Size((EXPERTS, COLUMNS, rank)) for rank in (16, 9)]
    dlow, slopes = sweep(
        dh, pair, [0.5, 2.0], routing, wide_parts=True, transposed=True, low=low, shapes=shapes, dtype=DTYPE
    )
    parts = list(zip([0.5, 2.0], dh.double().chunk(2, 1), pair, low.double().chunk(2, 1), slopes, strict=True))
    wanted = [s * project_reference(own, m.double(), routing) for s, own, m, _, _ in parts]
    assert relative_error(dlow, torch.cat(wanted, 1)) < tolerance()
    for (_, own, m, narrow, slope), shape in zip(parts, shapes, strict=True):
        exact = outer_reference(own, narrow, m.shape, routing)
        assert slope.shape == shape and relative_error(slope, exact[..., : shape[2]]) < tolerance()
        assert (slope[1] == 0).all()


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_projections_have_the_bits_of_tiles(dtype):
    """A trainer sweeps what an engine takes by tiles, in a batch in which the rows of an expert lie elsewhere."""
    routing, tiles, _ = random_rows()
    x, pair = values(TOKENS, COLUMNS), [values(EXPERTS, 16, COLUMNS).to(dtype) for _ in range(2)]
    kept = torch.full((ROWS, COLUMNS), torch.nan, dtype=x.dtype, device=DEVICE)
    low, slopes = sweep(x, pair, [0.5, 2.0], routing, gather=True, out=kept, in_order=True)
    assert not slopes
    assert torch.equal(kept, x[routing.order.long() // SLOTS][:, fragment_order(COLUMNS, DEVICE)])
    tiled = project(x, pair, [0.5, 2.0], routing, tiles, gather=True)
    assert relative_error(low, tiled) < tolerance() if INTERPRETED else torch.equal(low, tiled)
