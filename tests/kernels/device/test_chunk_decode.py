"""The decode kernel against `decode.dequantize`, bit for bit: every code under every scale, and ragged shapes."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED
from random_weights import random_case

from orbit_kernels.chunk_decode import decode_experts
from orbit_kernels.decode import FORMATS, dequantize
from orbit_kernels.grouped import PackedExperts


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal as bits, so that -0 is not 0; one NaN is as good as another."""
    whole = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    missing = expected.isnan()
    return torch.equal(actual.isnan(), missing) and torch.equal(
        actual.view(whole)[~missing], expected.view(whole)[~missing]
    )


def check(weight: PackedExperts, experts: list[int]) -> None:
    """`experts` of the weight by the kernel against the reference, part by part."""
    _, outputs, inputs = weight.shape
    index = torch.tensor(experts, device=DEVICE)
    out = torch.full((len(experts), outputs, inputs), 7.0, dtype=DTYPE, device=DEVICE)
    found = decode_experts(weight, index, out)
    for position, expert in enumerate(experts):
        shared = None if weight.global_scale is None else weight.global_scale[expert]
        scales = [None] * weight.parts if weight.scale is None else weight.scale[expert].chunk(weight.parts)
        parts = zip(weight.packed[expert].chunk(weight.parts), scales, strict=True)
        wanted = torch.cat([dequantize(packed, scale, weight.fmt, DTYPE, shared) for packed, scale in parts])
        assert same_bits(found[position], wanted)


def all_scales(fmt: str) -> torch.Tensor:
    """Every stored scale there is; for the interpreter those that it reads as the GPU does."""
    if fmt == "int4":
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        normal = every.isfinite() & (every.abs() >= torch.finfo(torch.bfloat16).tiny)
        return every[normal] if INTERPRETED else every  # it takes subnormal BF16 numbers for zero
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    return every if fmt == "mxfp4" else fp8(every)


def fp8(every: torch.Tensor) -> torch.Tensor:
    """All bytes as E4M3 numbers; the interpreter takes its NaN for 480."""
    return (every[every % 128 != 127] if INTERPRETED else every).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "nvfp4"])
def test_every_code_under_every_scale(fmt):
    scales = all_scales(fmt)
    codes = torch.arange(32).remainder(16).expand(len(scales), 32)  # both nibbles of a byte see every code
    codes = torch.cat((codes[:, :16], codes[:, 16:].roll(1, 1)), 1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    groups = 2 if fmt == "nvfp4" else 1
    scale = scales.view(-1, 1).repeat(1, groups)
    shared = torch.tensor([3.7]).to(DEVICE) if fmt == "nvfp4" else None
    weight = PackedExperts(packed=packed[None].to(DEVICE), scale=scale[None].to(DEVICE), fmt=fmt, global_scale=shared)
    check(weight, [0])


def test_every_fp8_number():
    numbers = fp8(torch.arange(256, dtype=torch.int16).to(torch.uint8)).view(torch.uint8)
    packed = torch.nn.functional.pad(numbers, (0, 256 - len(numbers))).repeat(4, 1).view(torch.float8_e4m3fn)
    scale = torch.tensor([[0.37, 3e-39]])  # the second makes subnormal products
    check(PackedExperts(packed=packed[None].to(DEVICE), scale=scale[None].to(DEVICE), fmt="fp8"), [0])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("outputs, inputs, parts", [(64, 96, 1), (192, 160, 2), (40, 1056, 1)])
def test_ragged_shapes_and_chosen_experts(fmt, outputs, inputs, parts):
    packed, scale, shared, _ = random_case(fmt, outputs, inputs, (4,))
    if fmt == "fp8":
        scale = torch.rand(4, parts * -(-outputs // parts // 128), -(-inputs // 128)) + 0.01
    move = [None if t is None else t.to(DEVICE) for t in (packed, scale, shared)]
    weight = PackedExperts(packed=move[0], scale=move[1], fmt=fmt, global_scale=move[2], parts=parts)
    check(weight, [3, 0])
    for part in range(parts):
        check(weight.part(part), [1, 2])
