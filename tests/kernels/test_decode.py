"""Decoding of every number format against float64 arithmetic written out here."""

import pytest
import torch
from random_weights import E2M1, random_case

from orbit_kernels.decode import FORMATS, decode_ue8m0, dequantize, unpack_codes


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decode_rounds_the_exact_product_once(fmt, lead, dtype):
    packed, scale, global_scale, expected = random_case(fmt, 130, 192, lead)
    decoded = dequantize(packed, scale, fmt, dtype, global_scale)
    assert decoded.dtype == dtype and decoded.shape == expected.shape
    if dtype == torch.bfloat16:
        expected = expected.float()  # the product is formed in float32 and rounded once more
    assert torch.equal(decoded, expected.to(dtype))


@pytest.mark.parametrize("fmt", ["int4", "mxfp4", "nvfp4"])
def test_all_sixteen_codes_in_both_nibbles(fmt):
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    packed = (low | high << 4).to(torch.uint8).reshape(16, 16)  # row: low code, column: high code
    scale = {
        "int4": torch.ones(16, 1),
        "mxfp4": torch.full((16, 1), 127, dtype=torch.uint8),
        "nvfp4": torch.ones(16, 2).to(torch.float8_e4m3fn),
    }[fmt]
    decoded = dequantize(packed, scale, fmt, torch.float32, torch.ones(1))
    table = torch.arange(-8, 8).float() if fmt == "int4" else E2M1.float()
    assert torch.equal(decoded[:, 0::2], table.view(16, 1).expand(16, 16))
    assert torch.equal(decoded[:, 1::2], table.view(1, 16).expand(16, 16))
    assert torch.equal(torch.signbit(decoded[8, 0::2]), torch.signbit(table[8]).expand(16))  # -0 stays -0


def test_ue8m0_bytes():
    decoded = decode_ue8m0(torch.tensor([0, 1, 126, 127, 128, 134, 254, 255], dtype=torch.uint8))
    assert decoded[:7].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 128.0, 2.0**127]
    assert torch.isnan(decoded[7])


def test_ue8m0_byte_255_makes_every_weight_of_its_group_nan():
    packed = (torch.arange(16) * 17).to(torch.uint8).view(1, 16).repeat(1, 2)  # every code, zeros too
    decoded = dequantize(packed, torch.tensor([[255, 127]], dtype=torch.uint8), "mxfp4", torch.bfloat16)
    assert decoded[:, :32].isnan().all() and decoded[:, 32:].isfinite().all()


def test_subnormal_mxfp4_scale_is_not_flushed():
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)  # all 1.0
    decoded = dequantize(packed, torch.zeros(1, 1, dtype=torch.uint8), "mxfp4", torch.float32)
    assert (decoded == 2.0**-127).all()


def test_decode_leaves_its_inputs_alone():
    for fmt in FORMATS:
        packed, scale, global_scale, _ = random_case(fmt, 32, 64)
        before = packed.clone()
        dequantize(packed, scale, fmt, torch.float32, global_scale)
        assert torch.equal(packed.view(torch.uint8), before.view(torch.uint8))


def test_unpack_codes_puts_the_low_nibble_first():
    assert unpack_codes(torch.tensor([[0x10, 0xFE]], dtype=torch.uint8)).tolist() == [[0, 1, 14, 15]]


def test_unknown_format_is_refused():
    with pytest.raises(ValueError, match="int3.*int4"):
        dequantize(torch.zeros(1, 16, dtype=torch.uint8), torch.ones(1, 1), "int3", torch.float32)
