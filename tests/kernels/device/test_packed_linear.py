"""A frozen linear by the grouped kernels: one expert of all rows, the bits of the trainer in the engine's class."""

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, relative_error, tolerance, values
from random_weights import random_case

from orbit_kernels import linear as linear_module
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


def test_what_is_kept_between_calls_follows_the_rows_and_the_inference_mode():
    """Calls of other sizes in turn, the first of them under inference_mode: each as if it were alone."""
    packed, scale, _, _ = random_case("int4", 64, 64, ())
    packed, scale = packed.to(DEVICE), (scale * 0.02).to(DEVICE)
    linear, exact = PackedLinear(packed, scale, "int4"), dequantize(packed, scale, "int4", torch.float64).cpu()
    with torch.inference_mode():
        linear.apply(values(3, 64))
    for rows in (3, 70, 0, 1, 3):
        x, dy = values(rows, 64), values(rows, 64)
        assert linear.apply(x).shape == (rows, 64) == _packed_gradient(dy, linear.weight).shape
        if rows:
            assert relative_error(linear.apply(x), x.double().cpu() @ exact.T) < tolerance(3)
            assert relative_error(_packed_gradient(dy, linear.weight), dy.double().cpu() @ exact) < tolerance(2)


if not INTERPRETED:  # a CUDA graph needs a GPU

    def test_a_graph_holds_nothing_that_other_calls_could_free():
        packed, scale, _, _ = random_case("int4", 64, 64, ())
        linear = PackedLinear(packed.to(DEVICE), (scale * 0.02).to(DEVICE), "int4")
        x = values(5, 64)
        wanted = linear.apply(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear.apply(x)
        assert linear_module._kept.cache_info().currsize > 0
        linear_module._kept.cache_clear()
        junk = [torch.full((1 << 20,), 7, dtype=torch.int32, device=DEVICE) for _ in range(8)]
        graph.replay()
        assert torch.equal(y, wanted) and len(junk) == 8
