"""SwiGLU and its gradient against autograd through PyTorch in float64, with and without a clamp."""

import pytest
import torch
from kernel_device import DEVICE, relative_error, tolerance, values

from orbit_kernels.swiglu import dot_chunks, swiglu, swiglu_gradient, swiglu_reference


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("in_order", [False, True])
def test_values(limit, in_order):
    h = values(9, 192)
    assert relative_error(swiglu(h, limit, in_order), swiglu_reference(h.double(), limit, in_order)) < tolerance()


@pytest.mark.parametrize("limit", [None, 0.7])
def test_gradient(limit):
    h, da = values(9, 192), values(9, 96)
    weights = torch.rand(9, device=DEVICE)
    wide = h.double().requires_grad_()
    a = swiglu_reference(wide, limit)
    expected = torch.autograd.grad(a, wide, da.double() * weights.double().unsqueeze(1))[0]
    dots = torch.full((dot_chunks(96), 9), torch.nan, device=DEVICE)
    kept = torch.full_like(da, torch.nan)
    found = swiglu_gradient(h, da, weights, limit, dots=dots, a=kept)
    assert torch.equal(kept, swiglu(h, limit))
    assert relative_error(found, expected) < tolerance()
    assert relative_error(dots.sum(0), (a.detach() * da.double()).sum(1)) < tolerance()
    if limit is not None:
        assert (found[:, 96:][h[:, 96:].abs() > limit] == 0).all()
