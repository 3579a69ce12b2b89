"""Frozen linears: values and gradients against float64, what is saved for backward, and the prepared form."""

import pytest
import torch
from random_weights import random_case

from orbit_kernels.decode import FORMATS, dequantize
from orbit_kernels.linear import PreparedLinear, frozen_linear


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradcheck_in_float64(fmt):
    packed, scale, global_scale, _ = random_case(fmt, 8, 32)
    x = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: frozen_linear(x, packed, scale, fmt, global_scale, bias), (x,))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_against_float64(fmt, dtype):
    packed, scale, global_scale, weight = random_case(fmt, 130, 192)
    x = torch.randn(5, 192).to(dtype).requires_grad_()
    bias = torch.randn(130)
    y = frozen_linear(x, packed, scale, fmt, global_scale, bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    tolerance = (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps  # float32: the sum over K adds its part
    assert y.dtype == dtype and x.grad.dtype == dtype
    assert relative_error(y, x.detach().double() @ weight.T + bias.double()) < tolerance
    assert relative_error(x.grad, dy.double() @ weight) < tolerance


@pytest.mark.parametrize("fmt", FORMATS)
def test_backward_is_the_adjoint_of_forward(fmt):
    packed, scale, global_scale, _ = random_case(fmt, 64, 96)
    x, dy = torch.randn(7, 96, dtype=torch.float64), torch.randn(7, 64, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = frozen_linear(leaf, packed, scale, fmt, global_scale)
    y.backward(dy)
    assert torch.isclose((y.detach() * dy).sum(), (x * leaf.grad).sum(), rtol=1e-12)


def test_nothing_but_the_packed_base_is_saved_for_backward():
    packed, scale, _, _ = random_case("int4", 64, 96)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen_linear(torch.randn(7, 96, requires_grad=True), packed, scale, "int4")
    assert {t.data_ptr() for t in saved} <= {packed.data_ptr(), scale.data_ptr()}
    assert all(t.dtype != torch.float32 for t in saved)


def test_base_and_bias_get_no_gradient():
    packed, scale, _, _ = random_case("int4", 64, 96)
    bias = torch.zeros(64, requires_grad=True)
    frozen_linear(torch.randn(2, 96, requires_grad=True), packed, scale, "int4", bias=bias).sum().backward()
    assert bias.grad is None and not packed.requires_grad


def test_without_gradient_the_result_is_the_same():
    packed, scale, _, _ = random_case("int4", 64, 96)
    x = torch.randn(3, 96)
    with_graph = frozen_linear(x.clone().requires_grad_(), packed, scale, "int4")
    assert torch.equal(frozen_linear(x, packed, scale, "int4"), with_graph.detach())
    with torch.inference_mode():
        assert torch.equal(frozen_linear(x, packed, scale, "int4"), with_graph.detach())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_prepared_linear_equals_decode_and_multiply(fmt, rows):
    packed, scale, global_scale, weight = random_case(fmt, 130, 192)
    prepared = PreparedLinear(packed, scale, fmt, global_scale)
    x, bias = torch.randn(rows, 192), torch.randn(130)
    plain = torch.nn.functional.linear(x, dequantize(packed, scale, fmt, torch.float32, global_scale), bias)
    assert torch.equal(prepared.apply(x, bias), plain)
    assert relative_error(prepared.apply(x), x.double() @ weight.T) < 16 * torch.finfo(torch.float32).eps
