"""The path through decoded chunks against the reference, its bound, and the remembered choice between paths."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, relative_error, tolerance, values
from random_weights import random_case

from orbit_kernels.chunked import chunked_product, fastest
from orbit_kernels.decode import FORMATS
from orbit_kernels.grouped import PackedExperts, forward_reference, gradient_reference

EXPERTS, OUTPUTS, INPUTS = 5, 256, 128


def random_experts(fmt: str) -> PackedExperts:
    packed, scale, global_scale, _ = random_case(fmt, OUTPUTS, INPUTS, (EXPERTS,))
    move = [None if t is None else t.to(DEVICE) for t in (packed, scale, global_scale)]
    return PackedExperts(packed=move[0], scale=move[1], fmt=fmt, global_scale=move[2], parts=2)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("counts", [[3, 0, 20, 1, 0], [0, 0, 0, 0, 9], [8, 8, 8, 8, 8]])
def test_both_directions(fmt, counts):
    weight = random_experts(fmt)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
    x, dy = values(sum(counts), INPUTS), values(sum(counts), OUTPUTS)
    budget = 5 * OUTPUTS * INPUTS * x.element_size()  # two experts a chunk
    y = chunked_product(x, weight, offsets, budget=budget)
    dx = chunked_product(dy, weight, offsets, gradient=True, budget=budget)
    exact = torch.float64  # the reference rounds weights to the dtype of its rows
    assert relative_error(y, forward_reference(x.to(exact), weight, offsets)) < tolerance(2)
    assert relative_error(dx, gradient_reference(dy.to(exact), weight, offsets)) < tolerance(2)


def test_a_budget_too_small_is_refused():
    weight, rows = random_experts("int4"), values(4, INPUTS)
    offsets = torch.tensor([0, 4, 4, 4, 4, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="does not hold two experts"):
        chunked_product(rows, weight, offsets, budget=OUTPUTS * INPUTS * DTYPE.itemsize)


def test_the_choice_is_measured_once_and_remembered(tmp_path):
    cache, measured = tmp_path / "folder" / "paths.json", []

    def measure(call) -> float:
        measured.append(call())
        return call()

    paths = {"slow": lambda: 2.0, "fast": lambda: 1.0}
    assert fastest(paths, "7168x4096 int4", cache, measure) == "fast"
    assert fastest(paths, "7168x4096 int4", cache, measure) == "fast"
    assert len(measured) == 2
    cache.write_text("{ not json")
    assert fastest(paths, "7168x4096 int4", cache, measure) == "fast" and len(measured) == 4
