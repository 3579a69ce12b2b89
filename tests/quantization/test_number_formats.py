"""Encoding and decoding of each number format: golden vectors (compressed-tensors 0.20.1), ties, zeros, round trips."""

import pytest
import torch

from orbit_cli.config.schema.base import NumberFormat
from orbit_cli.errors import CheckpointError
from orbit_cli.quantization import fp8, int4, mxfp4, nvfp4
from orbit_cli.quantization.formats import FORMATS
from orbit_cli.quantization.tensor import QuantizationError, measure_error
from orbit_kernels.decode import unpack_codes

NAMES = list(FORMATS)


def words(tensor: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08x}" for word in tensor.flatten().tolist()]


def hex_bytes(tensor: torch.Tensor) -> str:
    return bytes(tensor.flatten().tolist()).hex()


# --- INT4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (list(range(-8, 8)), [1985229328, -19088744]),
        ([0, 1, -1, 7, -8, 3, -4, 5], [-726599784]),
        ([1, 2, 3, 4, 5], [0x000DCBA9]),
    ],
)
def test_int4_packing_golden(values, expected):
    packed = int4.pack_nibbles(torch.tensor([values]) + 8)
    assert int4.to_words(packed).flatten().tolist() == expected


def test_int4_rounds_half_to_even_and_saturates():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.4, -7.4, 7.5, -7.5])
    row = torch.zeros(1, 32)
    row[0, : len(values)] = values  # amax 7.5: scale exactly 1
    tensor = int4.quantize(row, "w", torch.float32)
    assert tensor.scale.item() == 1.0
    codes = unpack_codes(tensor.packed)[0].int() - 8
    assert codes[: len(values)].tolist() == [0, 2, 2, 0, -2, -2, 7, -7, 7, -8]
    assert (codes[len(values) :] == 0).all()


@pytest.mark.parametrize(
    ("row", "scale", "expected"),
    [
        (torch.linspace(-1.6, 1.5, 32), 0.2133333, ["43322110", "87766554", "bbaa9988", "ffeeddcc"]),
        (torch.linspace(-0.31, 0.32, 32), 0.0426667, ["44332211", "87766555", "cbbaa998", "fffeeddc"]),
        (torch.zeros(32), 1.1920929e-07, ["88888888"] * 4),
    ],
)
def test_int4_group_golden(row, scale, expected):
    tensor = int4.quantize(row.unsqueeze(0), "w", torch.float32)
    assert tensor.scale.item() == pytest.approx(scale, rel=1e-6)
    assert words(int4.to_checkpoint(tensor)["weight_packed"]) == expected


def test_int4_outlier_golden():
    row = torch.full((1, 32), 0.5)
    row[0, 31] = -7.5
    tensor = int4.quantize(row, "w", torch.float32)
    decoded = tensor.dequantize()[0]
    assert tensor.scale.item() == 1.0 and decoded[31] == -8.0 and (decoded[:31] == 0).all()


def test_int4_shape_is_honoured_where_the_last_word_is_padded():
    tensors = {
        "weight_packed": torch.randint(-(2**31), 2**31 - 1, (2, 4), dtype=torch.int32),
        "weight_scale": torch.ones(2, 1),
        "weight_shape": torch.tensor([2, 32]),
    }
    assert int4.from_checkpoint(tensors, "m").packed.shape == (2, 16)
    tensors["weight_shape"] = torch.tensor([2, 64])
    with pytest.raises(CheckpointError, match="m.weight_packed.*2x64"):
        int4.from_checkpoint(tensors, "m")


def test_int4_codes_fit_the_rounded_scale():
    weight = torch.randn(64, 128)
    tensor = int4.quantize(weight, "w")
    assert tensor.scale.dtype == torch.bfloat16
    error = (tensor.dequantize() - weight).abs().view(64, 4, 32).amax(-1)
    assert (error <= 0.55 * tensor.scale.float()).all()  # 0.5 scale, and a little at +amax where the scale rounded down


def test_int4_is_not_idempotent_so_a_base_must_be_copied():
    weight = torch.full((1, 32), 7.0)
    once = int4.quantize(weight, "w", torch.float32).dequantize()
    twice = int4.quantize(once, "w", torch.float32).dequantize()
    assert (twice / once)[0, 0].item() == pytest.approx(14 / 15)


# --- E2M1, MXFP4 --------------------------------------------------------------------------------------------------


def test_e2m1_codes_and_packing_golden():
    values = torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]])
    codes = mxfp4.encode_e2m1(values)
    assert codes[0].tolist() == list(range(16))
    assert hex_bytes(int4.pack_nibbles(codes)) == "1032547698badcfe"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e2m1_ties_go_to_the_even_code_and_just_above_goes_up(dtype):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def rounded(values):
        return table[mxfp4.encode_e2m1(values).long()].tolist()

    assert rounded(ties) == [0, 1, 1, 2, 2, 4, 4]
    assert rounded(torch.nextafter(ties, torch.full_like(ties, 9))) == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert rounded(torch.nextafter(ties, torch.zeros_like(ties))) == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert rounded(torch.tensor([6.0, 7.0, 1e30], dtype=dtype)) == [6, 6, 6]
    assert mxfp4.encode_e2m1(torch.tensor([-0.1], dtype=dtype)).item() == 8


@pytest.mark.parametrize(
    ("amax", "byte"),
    [(1.0, 125), (1.5, 125), (1.74, 125), (1.75, 126), (1.99, 126), (2.0, 126), (3.49, 126), (3.5, 127), (6.0, 127),
     (7.0, 128), (0.0, 0), (1e-45, 0), (3.4e38, 253)],
)  # fmt: skip
def test_mxfp4_exponent_golden(amax, byte):
    assert mxfp4.encode_ue8m0(torch.tensor([amax])).item() == byte


def test_mxfp4_golden():
    third = torch.tensor([7.0] + [0.3, -0.3, 1.0] * 10 + [-5.2])
    row = torch.cat((torch.linspace(-3.1, 3.1, 32), torch.zeros(32), third)).unsqueeze(0)
    tensor = mxfp4.quantize(row, "w")
    assert tensor.scale[0].tolist() == [126, 0, 128]
    assert hex_bytes(tensor.packed) == (
        "ffefeededdccab891032445565667677" + "0" * 32 + "061880011880011880011880011880d1"
    )
    decoded = tensor.dequantize()[0]
    assert decoded[:4].tolist() == [-3, -3, -3, -2] and (decoded[32:64] == 0).all()
    assert decoded[64:68].tolist() == [8.0, 0.0, -0.0, 1.0] and decoded[95] == -6.0


# --- NVFP4 --------------------------------------------------------------------------------------------------------


def test_nvfp4_golden():
    first = torch.cat((torch.linspace(-1.5, 1.5, 16), torch.linspace(0, 0.03, 16)))
    second = torch.cat((torch.zeros(16), torch.tensor([3, -2.9, 1.1, 0.2] * 4)))
    tensor = nvfp4.quantize(torch.stack((first, second)), "w")
    assert tensor.global_scale.item() == 896
    assert tensor.scale.view(torch.uint8).tolist() == [[118, 73], [32, 126]]
    assert hex_bytes(tensor.packed[0]) == "ffeecd9a215466771022435465667677"
    assert hex_bytes(tensor.packed[1]) == "0000000000000000f714f714f714f714"
    decoded = tensor.dequantize()
    assert decoded[0, :4].tolist() == [-1.5, -1.5, -1, -1]
    assert decoded[0, 31].item() == pytest.approx(6 * 4.5 / 896)
    assert tensor.dequantize(torch.bfloat16)[0, 31].item() == pytest.approx(0.030151, rel=1e-4)
    assert decoded[1, 16:20].tolist() == [3, -3, 1, 0.25]


@pytest.mark.parametrize("amax", [0.0, float("nan"), 1e-45])
def test_nvfp4_global_scale_of_nothing_is_one(amax):
    assert nvfp4.global_scale_of(amax).item() == 1.0


def test_nvfp4_shares_a_given_global_scale():
    weight = torch.randn(4, 32)
    tensor = nvfp4.quantize(weight, "w", tensor_amax=10.0)
    assert tensor.global_scale.item() == pytest.approx(268.8)
    assert measure_error(weight, tensor).relative_rms < 0.15


# --- FP8 ----------------------------------------------------------------------------------------------------------


def test_fp8_golden():
    weight = torch.zeros(130, 200)
    weight[:128, :128] = 1.0
    weight[0, 0], weight[5, 7] = -3.5, 0.001
    weight[128:, 128:] = 0.02
    weight[128, 199] = 0.5
    tensor = fp8.quantize(weight, "w")
    assert torch.allclose(tensor.scale, torch.tensor([[0.0078125, 1.19e-7], [1.19e-7, 0.0011161]]), rtol=1e-2)
    assert tensor.scale[0, 0].item() == 0.0078125
    stored = tensor.packed.view(torch.uint8)
    cells = ((0, 0), (0, 1), (5, 7), (128, 128), (128, 199))
    assert [stored[cell].item() for cell in cells] == [0xFE, 0x70, 0x20, 0x59, 0x7E]
    decoded = tensor.dequantize()
    assert decoded.shape == (130, 200)
    assert [decoded[cell].item() for cell in cells] == pytest.approx([-3.5, 1, 0.000976563, 0.0200893, 0.5], rel=1e-5)
    assert (decoded[:128, 128:] == 0).all()


def test_fp8_saturates_instead_of_nan():
    weight = torch.randn(128, 128).mul_(1e3)
    assert torch.isfinite(fp8.quantize(weight, "w").dequantize()).all()


# --- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number_format", NAMES)
def test_checkpoint_round_trip_is_exact(number_format):
    module = FORMATS[number_format]
    tensor = module.quantize(torch.randn(130, 192), "w")
    stored = module.to_checkpoint(tensor)
    assert tuple(stored) == module.SUFFIXES
    again = module.from_checkpoint(stored, "m")
    assert again.format is number_format and again.shape == (130, 192)
    assert torch.equal(again.packed.view(torch.uint8), tensor.packed.view(torch.uint8))
    assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("number_format", NAMES)
def test_zeros_decode_to_zeros(number_format):
    weight = torch.randn(128, 128)
    weight[3, :32] = 0
    assert (FORMATS[number_format].quantize(weight, "w").dequantize()[3, :32] == 0).all()
    nothing = FORMATS[number_format].quantize(torch.zeros(128, 128), "w")
    assert (nothing.dequantize() == 0).all()
    assert measure_error(torch.zeros(128, 128), nothing).relative_rms == 0


@pytest.mark.parametrize(("number_format", "bound"), [("int4", 0.12), ("mxfp4", 0.14), ("nvfp4", 0.12), ("fp8", 0.04)])
def test_error_of_normal_weights_is_as_small_as_the_format_allows(number_format, bound):
    weight = torch.randn(256, 512) * 0.02
    tensor = FORMATS[NumberFormat(number_format)].quantize(weight, "w")
    error = measure_error(weight, tensor)
    direct = (tensor.dequantize() - weight).double()
    assert 0 < error.relative_rms < bound
    assert error.relative_rms == pytest.approx((direct.norm() / weight.double().norm()).item(), rel=1e-5)
    assert error.max_abs == direct.abs().max().item()


def test_errors_of_parts_add_up():
    weight, module = torch.randn(512, 64), FORMATS[NumberFormat.fp8]
    whole = measure_error(weight, module.quantize(weight, "w"))
    parts = QuantizationError()
    for start in (0, 256):
        part = weight[start : start + 256]
        parts.add(measure_error(part, module.quantize(part, "w")))
    assert parts.relative_rms == pytest.approx(whole.relative_rms) and parts.max_abs == whole.max_abs


def test_error_is_measured_block_by_block():
    weight = torch.randn(300, 40_000)  # several blocks of rows
    tensor = FORMATS[NumberFormat.fp8].quantize(weight, "w")
    expected = (tensor.dequantize() - weight).double().norm() / weight.double().norm()
    assert measure_error(weight, tensor).relative_rms == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("number_format", NAMES)
@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "Inf"), (-float("inf"), "Inf")])
def test_nan_and_inf_are_refused_by_name(number_format, value, kind):
    weight = torch.randn(128, 128)
    weight[17, 33] = value
    with pytest.raises(CheckpointError, match=f"model.layers.0.w holds {kind}"):
        FORMATS[number_format].quantize(weight, "model.layers.0.w")


@pytest.mark.parametrize("number_format", ["int4", "mxfp4", "nvfp4"])
def test_inputs_that_are_no_multiple_of_the_group_are_refused(number_format):
    module = FORMATS[NumberFormat(number_format)]
    with pytest.raises(CheckpointError, match=f"w has 40 inputs.*group of {module.GROUP}"):
        module.quantize(torch.randn(8, 40), "w")


@pytest.mark.parametrize("number_format", ["int4", "nvfp4", "fp8"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_stored_scales_that_are_zero_nan_or_inf_are_refused(number_format, value):
    module = FORMATS[NumberFormat(number_format)]
    stored = module.to_checkpoint(module.quantize(torch.randn(128, 128), "w"))
    scale = stored["weight_scale"].float()
    scale[0, 0] = value
    stored["weight_scale"] = scale.to(stored["weight_scale"].dtype)
    kind = "0" if value == 0 else "(NaN|Inf)"  # E4M3 has no Inf: it is stored as NaN
    with pytest.raises(CheckpointError, match=rf"m.weight_scale holds 1 scale\(s\) that are {kind}"):
        module.from_checkpoint(stored, "m")


def test_nvfp4_global_scale_of_zero_is_refused():
    stored = nvfp4.to_checkpoint(nvfp4.quantize(torch.randn(4, 32), "w"))
    stored["weight_global_scale"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="m.weight_global_scale"):
        nvfp4.from_checkpoint(stored, "m")


def test_ue8m0_byte_255_is_refused():
    stored = mxfp4.to_checkpoint(mxfp4.quantize(torch.randn(4, 64), "w"))
    stored["weight_scale"][2, 1] = 255
    with pytest.raises(CheckpointError, match="m.weight_scale.*255"):
        mxfp4.from_checkpoint(stored, "m")
