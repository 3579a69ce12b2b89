"""A frozen linear by the grouped kernels: one expert of all rows, the bits of the trainer in the engine's class."""

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, relative_error, tolerance, values
from random_weights import random_case

from orbit_kernels.decode import dequantize
from orbit_kernels.linear import PackedLinear, _packed_gradient


@pytest.mark.parametrize("fmt", ["int4", "mxfp4"])
def test_product_and_input_gradient(fmt):
    outputs, inputs = 96, 64
    packed, scale, global_scale, _ = random_case(fmt, outputs, inputs, ())
    scale = scale * 0.02 if fmt == "int4" else scale - 8
    packed, scale = packed.to(DEVICE), scale.to(DEVICE)
    x, dy, bias = values(2, 5, inputs), values(2, 5, outputs), values(outputs)
    linear = PackedLinear(packed, scale, fmt)
    exact = dequantize(packed, scale, fmt, torch.float64)
    wanted = x.double().cpu() @ exact.cpu().T + bias.double().cpu()
    assert relative_error(linear.apply(x, bias), wanted) < tolerance(3)
    assert relative_error(_packed_gradient(dy, linear.weight), dy.double().cpu() @ exact.cpu()) < tolerance(2)


def test_a_row_has_the_same_bits_in_any_batch():
    packed, scale, _, _ = random_case("int4", 64, 64, ())
    linear = PackedLinear(packed.to(DEVICE), (scale * 0.02).to(DEVICE), "int4")
    x = values(70, 64)
    whole = linear.apply(x)
    for own in (slice(33, 34), slice(0, 20)):
        part = linear.apply(x[own])
        if INTERPRETED:  # numpy chooses the order of summation by the shape
            assert relative_error(part, whole[own]) < tolerance()
        else:
            assert torch.equal(part, whole[own])
