"""Grouped products over packed experts against float64, on ragged groups, in both directions.

The same tests run under Triton's interpreter on a CPU (float32) and natively on a GPU (BF16), see kernel_device.py.
"""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED, relative_error, tolerance, values
from random_weights import random_case

from orbit_kernels.decode import FORMATS
from orbit_kernels.fragments import fragment_order
from orbit_kernels.grouped import (
    LowRank,
    PackedExperts,
    decoded_expert,
    forward_reference,
    gradient_reference,
    grouped_forward,
    grouped_input_gradient,
)

TILE = 32
COUNTS = ([0, 1, TILE - 1, TILE, TILE + 1, 0], [0, 0, 3 * TILE + 5, 0], [1, TILE // 4, TILE // 2, TILE // 2 + 1])
# On a Hopper GPU the second shape takes the Gluon kernels, the first the plain ones.
SHAPES = [(64, 96)] if INTERPRETED else [(320, 416), (512, 1024)]
OUTPUTS, INPUTS = SHAPES[-1]


def random_experts(fmt: str, experts: int, outputs: int = OUTPUTS, inputs: int = INPUTS, parts: int = 1):
    """(weight on the device, float64 [E, N, K] as the kernels round it)."""
    packed, scale, global_scale, _ = random_case(fmt, outputs, inputs, (experts,))
    if fmt == "fp8" and parts > 1:
        scale = torch.rand(experts, parts * -(-outputs // parts // 128), -(-inputs // 128)) + 0.01
    weight = PackedExperts(
        packed=packed.to(DEVICE),
        scale=None if scale is None else scale.to(DEVICE),
        fmt=fmt,
        global_scale=None if global_scale is None else global_scale.to(DEVICE),
        parts=parts,
    )
    return weight, torch.stack([decoded_expert(weight, e, DTYPE) for e in range(experts)]).double().cpu()


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)


def in_order(x: torch.Tensor, weight: PackedExperts) -> torch.Tensor:
    """x as `grouped_forward` takes it."""
    return x[..., fragment_order(x.shape[-1], x.device)].contiguous() if weight.in_fragment_order else x


def poisoned(*shape: int) -> torch.Tensor:
    """NaN everywhere, with a row more than asked for at the end."""
    return torch.full((shape[0] + 1, *shape[1:]), torch.nan, dtype=DTYPE, device=DEVICE)


def per_expert(rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """rows of expert e times matrices[e], in float64 on the CPU."""
    return torch.cat([r @ m for r, m in zip(rows.double().cpu().split(counts), matrices, strict=True)])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_both_directions_against_float64(fmt, counts, outputs, inputs):
    weight, dense = random_experts(fmt, len(counts), outputs, inputs)
    x, dy = values(sum(counts), inputs), values(sum(counts), outputs)
    y = poisoned(sum(counts), outputs)
    grouped_forward(in_order(x, weight), weight, offsets_of(counts), tile=TILE, out=y[:-1])
    assert relative_error(y[:-1], per_expert(x, dense.transpose(1, 2), counts)) < tolerance()
    assert y[-1].isnan().all()  # nothing is written past the last row
    dx = poisoned(sum(counts), inputs)
    grouped_input_gradient(dy, weight, offsets_of(counts), tile=TILE, out=dx[:-1])
    assert relative_error(dx[:-1], per_expert(dy, dense, counts)) < tolerance()
    assert dx[-1].isnan().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_read_and_write_their_own_rows(fmt):
    counts = [5, 0, 40]
    weight, dense = random_experts(fmt, 3, 2 * OUTPUTS if fmt == "fp8" else OUTPUTS, parts=2)
    x, dy = values(2, sum(counts), INPUTS), values(sum(counts), dense.shape[1])
    halves = dense.chunk(2, 1)
    y = grouped_forward(in_order(x, weight), weight, offsets_of(counts), split=True)
    wanted = [per_expert(x[p], halves[p].transpose(1, 2), counts) for p in range(2)]
    assert relative_error(y, torch.cat(wanted, 1)) < tolerance()
    assert relative_error(forward_reference(x, weight, offsets_of(counts), split=True), y) < 2 * tolerance()
    dx = grouped_input_gradient(dy, weight, offsets_of(counts), split=True)
    wanted = torch.stack([per_expert(d, h, counts) for d, h in zip(dy.chunk(2, 1), halves, strict=True)])
    assert relative_error(dx, wanted) < tolerance()
    assert relative_error(gradient_reference(dy, weight, offsets_of(counts), split=True), dx) < 2 * tolerance()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rank, parts", [(16, 2)] if INTERPRETED else [(16, 2), (64, 1), (128, 2)])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_low_rank_sums_are_added_before_the_rounding(fmt, rank, parts, outputs, inputs):
    counts = [5, 0, 40]
    outputs *= parts
    weight, dense = random_experts(fmt, 3, outputs, inputs, parts=parts)
    x, dy = values(45, inputs), values(45, outputs)
    low, size = values(45, parts * rank), inputs**0.5  # products as large as the base's
    b, a = [
        [values(3, *shape).mul_(size) for _ in range(parts)] for shape in ((outputs // parts, rank), (rank, inputs))
    ]
    narrow = low.double().cpu().chunk(parts, 1)
    y = poisoned(45, outputs)
    added = LowRank(rows=low, matrices=tuple(b))
    grouped_forward(in_order(x, weight), weight, offsets_of(counts), low=added, tile=TILE, out=y[:-1])
    wide = [per_expert(own, m.double().cpu().transpose(1, 2), counts) for own, m in zip(narrow, b, strict=True)]
    assert relative_error(y[:-1], per_expert(x, dense.transpose(1, 2), counts) + torch.cat(wide, 1)) < tolerance()
    dx = poisoned(45, inputs)
    added = LowRank(rows=low, matrices=tuple(a))
    grouped_input_gradient(dy, weight, offsets_of(counts), low=added, tile=TILE, out=dx[:-1])
    wide = sum(per_expert(own, m.double().cpu(), counts) for own, m in zip(narrow, a, strict=True))
    assert relative_error(dx[:-1], per_expert(dy, dense, counts) + wide) < tolerance()
    assert y[-1].isnan().all() and dx[-1].isnan().all()


@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_versions_of_an_expert_have_low_ranks_of_their_own(outputs, inputs):
    """Two slots for each of two experts: the same bits as each version alone."""
    weight, _ = random_experts("int4", 2, outputs, inputs)
    x, low, b = in_order(values(60, inputs), weight), values(60, 16), values(4, outputs, 16)
    bounds = [0, 10, 37, 37, 60]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    y = grouped_forward(x, weight, offsets, low=LowRank(rows=low, matrices=(b,)), slots=2, tile=TILE)
    for group, (first, last) in ((0, (0, 10)), (1, (10, 37)), (3, (37, 60))):
        own = [0, *(last - first if expert == group // 2 else 0 for expert in range(2))]
        added = LowRank(rows=low[first:last].contiguous(), matrices=(b[group % 2 :: 2].contiguous(),))
        rows = x[first:last].contiguous()
        alone = grouped_forward(rows, weight, offsets_of(own[1:]), low=added, tile=TILE)
        assert relative_error(y[first:last], alone) < tolerance() if INTERPRETED else torch.equal(y[first:last], alone)


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradient_is_the_adjoint_of_forward(fmt):
    """<dY, f(x)> = <g(dY), x>, to what rounding both results allows."""
    counts = [7, 0, 50]
    weight, _ = random_experts(fmt, 3)
    x, dy = values(57, INPUTS), values(57, OUTPUTS)
    y = grouped_forward(in_order(x, weight), weight, offsets_of(counts))
    dx = grouped_input_gradient(dy, weight, offsets_of(counts))
    left, right = (dy.double() * y.double()).sum(), (dx.double() * x.double()).sum()
    assert abs(left - right) < tolerance() * y.double().norm() * dy.double().norm()


def each_scale_of(fmt: str) -> torch.Tensor:
    """Every scale [n] that the format can store with finite products; of INT4's a sample on the interpreter."""
    if fmt == "int4":
        scale = torch.arange(0, 1 << 15, 331 if INTERPRETED else 1).to(torch.int16).view(torch.bfloat16)
        return scale[scale < 2.0**120]
    if fmt == "mxfp4":  # the interpreter reads subnormal BF16 numbers, here 2^-127, as zero
        return torch.arange(1 if INTERPRETED else 0, 252).to(torch.uint8)
    return torch.arange(0, 127).to(torch.uint8).view(torch.float8_e4m3fn)


def each_code_once(fmt: str) -> PackedExperts:
    """One expert [n, 32]: each row has a scale of its own, every code, and over 16 rows each code in every place."""
    scale = each_scale_of(fmt)
    scale = scale[torch.arange(-(-scale.numel() // 32) * 32) % scale.numel()]  # whole 32-groups
    codes = (torch.arange(32) + torch.arange(scale.numel()).unsqueeze(1)) % 16
    groups = 2 if fmt == "nvfp4" else 1
    return PackedExperts(
        packed=(codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).unsqueeze(0).to(DEVICE),
        scale=scale.view(1, -1, 1).expand(-1, -1, groups).contiguous().to(DEVICE),
        fmt=fmt,
        global_scale=torch.ones(1, device=DEVICE) if fmt == "nvfp4" else None,
    )


@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "nvfp4"])
def test_every_code_under_every_scale_bit_for_bit(fmt):
    """Products with the identity are the weights themselves; each code meets each scale in both directions."""
    weight = each_code_once(fmt)
    expected = decoded_expert(weight, 0, DTYPE)  # [N, 32]
    outputs = expected.shape[0]
    unit = torch.eye(32, dtype=DTYPE, device=DEVICE)
    y = grouped_forward(in_order(unit, weight), weight, offsets_of([32]))
    assert torch.equal(y.T, expected)
    step = min(outputs, 2048)
    for first in range(0, outputs, step):
        unit = torch.zeros(min(step, outputs - first), outputs, dtype=DTYPE, device=DEVICE)
        unit.diagonal(first).fill_(1)
        dx = grouped_input_gradient(unit, weight, offsets_of([len(unit)]))
        assert torch.equal(dx, expected[first : first + step])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_batch_position_or_tile(fmt):
    weight, _ = random_experts(fmt, 2)  # on a Hopper GPU the row alone is in a tile of 8 for INT4 and MXFP4
    row, filler = values(1, INPUTS), values(70, INPUTS)
    alone = grouped_forward(in_order(row, weight), weight, offsets_of([0, 1]))
    for tile, before in ((16, 0), (64, 41)) if INTERPRETED else ((16, 0), (32, 3), (64, 41), (128, 50)):
        x = torch.cat((filler[: 5 + before], row, filler[before:]))
        y = grouped_forward(in_order(x, weight), weight, offsets_of([5, len(x) - 5]), tile=tile)
        if INTERPRETED:  # numpy chooses the order of summation by the shape of the tile
            assert relative_error(y[5 + before], alone[0]) < tolerance()
        else:
            assert torch.equal(y[5 + before], alone[0])


def test_runs_repeat_bit_for_bit():
    weight, _ = random_experts("int4", 2)
    x, dy, offsets = values(90, INPUTS), values(90, OUTPUTS), offsets_of([20, 70])
    first = grouped_forward(in_order(x, weight), weight, offsets), grouped_input_gradient(dy, weight, offsets)
    again = grouped_forward(in_order(x, weight), weight, offsets), grouped_input_gradient(dy, weight, offsets)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_a_wrong_kernel_would_be_noticed():
    """The mistakes that the design invites: activations in natural order, rows of the neighbour, one code off."""
    counts = [20, 44]
    weight, dense = random_experts("int4", 2)
    x = values(64, INPUTS)
    wanted = per_expert(x, dense.transpose(1, 2), counts)
    shifted = PackedExperts(packed=weight.packed ^ 16, scale=weight.scale, fmt="int4")
    wrong = (
        grouped_forward(x, weight, offsets_of(counts)),
        grouped_forward(in_order(x, weight), weight, offsets_of([21, 43])),
        grouped_forward(in_order(x, shifted), shifted, offsets_of(counts)),
    )
    assert all(relative_error(y, wanted) > 4 * tolerance() for y in wrong)


def test_no_rows():
    weight, _ = random_experts("int4", 3)
    y = grouped_forward(values(0, INPUTS), weight, offsets_of([0, 0, 0]))
    dx = grouped_input_gradient(values(0, OUTPUTS), weight, offsets_of([0, 0, 0]))
    assert y.shape == (0, OUTPUTS) and dx.shape == (0, INPUTS)


def test_what_does_not_fit_is_refused_with_its_reason():
    weight, _ = random_experts("int4", 2)
    offsets = offsets_of([1, 2])
    with pytest.raises(ValueError, match=rf"shape \[3, 32\].*{INPUTS}"):
        grouped_forward(values(3, 32), weight, offsets)
    with pytest.raises(ValueError, match="float16.*convert"):
        grouped_forward(values(3, INPUTS).half(), weight, offsets)
    with pytest.raises(ValueError, match=r"int32 \[3\]"):
        grouped_forward(values(3, INPUTS), weight, offsets[:2])
    with pytest.raises(ValueError, match="contiguous"):
        grouped_forward(values(3, 2 * INPUTS)[:, ::2], weight, offsets)
    float_scale = PackedExperts(packed=weight.packed, scale=weight.scale.float(), fmt="int4")
    with pytest.raises(ValueError, match="bfloat16"):
        grouped_forward(values(3, INPUTS), float_scale, offsets)
