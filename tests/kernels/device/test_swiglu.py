"""SwiGLU and its gradient against autograd through PyTorch in float64, with and without a clamp."""

import pytest
import torch
from kernel_device import relative_error, tolerance, values

from orbit_kernels.swiglu import swiglu, swiglu_gradient, swiglu_reference


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("in_order", [False, True])
def test_values(limit, in_order):
    h = values(9, 192)
    assert relative_error(swiglu(h, limit, in_order), swiglu_reference(h.double(), limit, in_order)) < tolerance()


@pytest.mark.parametrize("limit", [None, 0.7])
def test_gradient(limit):
    h, da = values(9, 192), values(9, 96)
    wide = h.double().requires_grad_()
    expected = torch.autograd.grad(swiglu_reference(wide, limit), wide, da.double())[0]
    assert relative_error(swiglu_gradient(h, da, limit), expected) < tolerance()
    if limit is not None:
        assert (swiglu_gradient(h, da, limit)[:, 96:][h[:, 96:].abs() > limit] == 0).all()
