"""What frozen experts and linears refuse, each with its sentence: nothing below may run, or give numbers."""

import pytest
import torch
from random_weights import random_case

from orbit_kernels.checks import PACKED, stored_misfit
from orbit_kernels.decode import FORMATS
from orbit_kernels.experts import ExpertAdapters, StackedAdapter, frozen_experts
from orbit_kernels.linear import PackedLinear, PreparedLinear, frozen_linear

EXPERTS, HIDDEN, INTER, TOKENS, BLOCK, RANK = 6, 64, 32, 3, 16, 4


def good(fmt: str = "int4") -> dict:
    """Arguments that fit: three tokens, two slots."""
    w13 = random_case(fmt, 2 * INTER, HIDDEN, (EXPERTS,))
    w2 = random_case(fmt, HIDDEN, INTER, (EXPERTS,))
    if fmt == "fp8":  # gate and up have scale blocks of their own
        w13 = (w13[0], torch.rand(EXPERTS, 2, 1), None)
    return {
        "x": torch.randn(TOKENS, HIDDEN),
        "expert_ids": torch.tensor([[0, 1], [2, 3], [4, 5]]),
        "weights": torch.rand(TOKENS, 2),
        "w13_packed": w13[0],
        "w13_scale": w13[1],
        "w13_global_scale": w13[2],
        "w2_packed": w2[0],
        "w2_scale": w2[1],
        "w2_global_scale": w2[2],
        "fmt": fmt,
    }


def turns(experts: int = EXPERTS, blocks: int = HIDDEN // BLOCK, rows: int = BLOCK, columns: int = BLOCK):
    return {"rotation": torch.randn(experts, blocks, rows, columns)}


def low(experts: int = EXPERTS, inputs: int = HIDDEN, outputs: int = INTER, rank: int = RANK, of_b: int = RANK):
    return {"lora_a": torch.randn(experts, rank, inputs), "lora_b": torch.randn(experts, outputs, of_b)}


def half(a: bool) -> dict:
    """LoRA with one of its two matrices."""
    name = "lora_a" if a else "lora_b"
    return {name: low()[name]}


def refusal(arguments: dict) -> str:
    with pytest.raises(ValueError) as caught:
        frozen_experts(**arguments)
    return str(caught.value)


ROUTING = {
    "an id below": ({"expert_ids": -torch.ones(TOKENS, 2, dtype=torch.long)}, "holds -1, experts 0 to 5, padding"),
    "an id above": ({"expert_ids": torch.full((TOKENS, 2), 6)}, "holds 6, experts 0 to 5"),
    "float ids": ({"expert_ids": torch.zeros(TOKENS, 2)}, "torch.float32, number no experts, int64"),
    "bool ids": ({"expert_ids": torch.zeros(TOKENS, 2, dtype=torch.bool)}, "torch.bool, int64"),
    "integer weights": ({"weights": torch.ones(TOKENS, 2, dtype=torch.long)}, "weights are torch.int64, floating"),
    "no slots": ({"expert_ids": torch.empty(TOKENS, 0).long(), "weights": torch.empty(TOKENS, 0)}, "[3, 0], one slot"),
    "flat ids": ({"expert_ids": torch.zeros(TOKENS).long(), "weights": torch.rand(TOKENS)}, "must both be [3, slots]"),
    "integer x": ({"x": torch.ones(TOKENS, HIDDEN, dtype=torch.long)}, "x is torch.int64, torch.bfloat16"),
    "x elsewhere": ({"x": torch.empty(TOKENS, HIDDEN, device="meta")}, "expert_ids is on cpu, x is on meta, move"),
}


@pytest.mark.parametrize("change, words", ROUTING.values(), ids=ROUTING.keys())
def test_routing_that_does_not_fit(change, words):
    said = refusal(good() | change)
    assert all(word in said for word in words.split(", "))


STORED = {
    "one column": ("int4", "w13_scale", lambda a: a["w13_scale"][..., :1], "w13_scale; [6, 64, 1]; [6, 64, 2]"),
    "one row": ("int4", "w13_scale", lambda a: a["w13_scale"][:, :1], "w13_scale; [6, 1, 2]; [6, 64, 2]; of a row"),
    "another's": ("int4", "w13_scale", lambda a: a["w2_scale"], "w13_scale; [6, 64, 1]; made with w13_packed"),
    "none": ("int4", "w2_scale", lambda a: None, "w2_scale is None; pass them"),
    "int4 as mxfp4": ("int4", "fmt", lambda a: "mxfp4", "w13_scale is torch.bfloat16; mxfp4's scales are torch.uint8"),
    "mxfp4 as int4": ("mxfp4", "fmt", lambda a: "int4", "w13_scale is torch.uint8; int4's scales are torch.bfloat16"),
    "nvfp4 as int4": ("nvfp4", "fmt", lambda a: "int4", "w13_scale is torch.float8_e4m3fn"),
    "int4 as bf16": ("int4", "fmt", lambda a: "bf16", "w13_packed is torch.uint8; bf16 is stored as torch.bfloat16"),
    "bf16 as int4": ("bf16", "fmt", lambda a: "int4", "w13_packed is torch.bfloat16; int4 is stored as torch.uint8"),
    "bf16 as fp8": ("bf16", "fmt", lambda a: "fp8", "w13_packed is torch.bfloat16; torch.float8_e4m3fn"),
    "no format": ("int4", "fmt", lambda a: "int8", "'int8' cannot be decoded; use one of int4, mxfp4"),
    "blocks of both": ("fp8", "w13_scale", lambda a: a["w13_scale"][:, :1], "[6, 1, 1]; [6, 2, 1]; of gate and of up"),
    "bf16 scales": ("bf16", "w2_scale", lambda a: torch.ones(EXPERTS, HIDDEN, 1), "w2_scale; no scales; pass None"),
    "no shared": ("nvfp4", "w2_global_scale", lambda a: None, "w2_global_scale is None; pass 6 of float32"),
    "one shared": ("nvfp4", "w13_global_scale", lambda a: torch.ones(1), "[1]; one number for each; pass 6"),
    "turned shared": ("nvfp4", "w13_global_scale", lambda a: a["w13_global_scale"].T, "[1, 6]; pass 6"),
    "shared of int4": ("int4", "w13_global_scale", lambda a: torch.ones(EXPERTS), "only nvfp4 has one; pass None"),
    "one expert": ("int4", "w13_packed", lambda a: a["w13_packed"][0], "w13_packed; [experts, outputs, inputs / 2]"),
    "odd rows": ("int4", "w13_packed", lambda a: a["w13_packed"][:, :63], "63 rows; not 2 equal parts"),
    "part of a group": ("int4", "w2_packed", lambda a: a["w2_packed"][..., :8], "16 inputs; group of 32; pad"),
    "scale elsewhere": ("int4", "w2_scale", lambda a: a["w2_scale"].to("meta"), "w2_scale is on meta; move one"),
}


@pytest.mark.parametrize("fmt, name, change, words", STORED.values(), ids=STORED.keys())
def test_weights_and_scales_that_do_not_fit(fmt, name, change, words):
    arguments = good(fmt)
    said = refusal(arguments | {name: change(arguments)})
    assert all(word in said for word in words.split("; "))


ADAPTERS = {
    "twice the experts": ("gate", turns(12), "adapter.gate.rotation; [12, 4, 16, 16]; 6 experts; [6, 64 / b, b, b]"),
    "too few experts": ("up", turns(5), "adapter.up.rotation; [5, 4, 16, 16]; 6 experts"),
    "inputs left over": ("gate", turns(blocks=3), "[6, 3, 16, 16]; all 64 inputs"),
    "blocks of the other": ("down", turns(), "adapter.down.rotation; [6, 4, 16, 16]; all 32 inputs"),
    "no squares": ("gate", turns(columns=8), "[6, 4, 16, 8]; square blocks"),
    "one expert's": ("gate", {"rotation": turns()["rotation"][0]}, "[4, 16, 16]; pass [6, 64 / b, b, b]"),
    "no down": ("gate", half(a=False), "adapter.gate has lora_b without lora_a; pass both"),
    "no up": ("gate", half(a=True), "adapter.gate has lora_a without lora_b; pass both"),
    "one row": ("gate", low(outputs=1), "adapter.gate.lora_b; [6, 1, 4]; 32 outputs; [6, 32, 4]"),
    "two ranks": ("gate", low(of_b=8), "adapter.gate.lora_b; [6, 32, 8]; [6, 32, 4]"),
    "rank 0": ("gate", low(rank=0, of_b=0), "adapter.gate.lora_a; [6, 0, 64]; [6, rank, 64]"),
    "other inputs": ("down", low(), "adapter.down.lora_a; [6, 4, 64]; 32 inputs"),
    "twice the experts of LoRA": ("up", low(12), "adapter.up.lora_a; [12, 4, 64]; [6, rank, 64]"),
    "nothing": ("down", {}, "adapter.down is empty; pass adapter.down=None"),
    "integers": ("gate", {"rotation": turns()["rotation"].long()}, "rotation is torch.int64; torch.float32"),
    "elsewhere": ("gate", {"rotation": turns()["rotation"].to("meta")}, "adapter.gate.rotation is on meta; move one"),
}


@pytest.mark.parametrize("name, tensors, words", ADAPTERS.values(), ids=ADAPTERS.keys())
def test_adapters_that_do_not_fit(name, tensors, words):
    said = refusal(good() | {"adapter": ExpertAdapters(**{name: StackedAdapter(**tensors)})})
    assert all(word in said for word in words.split("; "))


@pytest.mark.parametrize("path", ["kernels", "chunked", "fastest"])
@pytest.mark.parametrize("tokens", [TOKENS, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_cpu(path, tokens, dtype):
    few = {name: good()[name][:tokens] for name in ("x", "expert_ids", "weights")}
    said = refusal(good() | few | {"path": path, "x": few["x"].to(dtype)})
    assert all(word in said for word in (f"path='{path}'", "CUDA device", "on cpu", "path='auto' or 'reference'"))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("ids", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_what_fits_runs(fmt, ids):
    arguments = good(fmt)
    arguments["expert_ids"] = arguments["expert_ids"].to(ids)
    assert frozen_experts(**arguments).shape == (TOKENS, HIDDEN)


def test_every_format_has_a_rule():
    assert set(PACKED) == set(FORMATS)


LINEARS = {
    "one column": (lambda a: a | {"scale": a["scale"][:, :1]}, "scale has shape [8, 1]; [8, 2]"),
    "none": (lambda a: a | {"scale": None}, "scale is None"),
    "int4 as mxfp4": (lambda a: a | {"fmt": "mxfp4"}, "scale is torch.bfloat16; torch.uint8"),
    "stacked": (lambda a: a | {"packed": a["packed"][None]}, "[1, 8, 32]; [outputs, inputs / 2]"),
    "x": (lambda a: a | {"x": a["x"][:, :32]}, "x has shape [3, 32]; 64 inputs"),
    "integer x": (lambda a: a | {"x": a["x"].long()}, "x is torch.int64"),
    "bias": (lambda a: a | {"bias": torch.ones(1)}, "bias has shape [1]; 8 outputs"),
    "elsewhere": (lambda a: a | {"bias": torch.ones(8, device="meta")}, "bias is on meta; move one"),
}


@pytest.mark.parametrize("change, words", LINEARS.values(), ids=LINEARS.keys())
@pytest.mark.parametrize("gradient", [False, True])
def test_linears_that_do_not_fit(change, words, gradient):
    packed, scale, *_ = random_case("int4", 8, 64)
    arguments = change({"x": torch.randn(3, 64), "packed": packed, "scale": scale, "fmt": "int4"})
    if gradient and arguments["x"].is_floating_point():
        arguments["x"].requires_grad_()
    with pytest.raises(ValueError) as caught:
        frozen_linear(**arguments)
    assert all(word in str(caught.value) for word in words.split("; "))


@pytest.mark.parametrize("kind", [PreparedLinear, PackedLinear])
def test_prepared_linears_look_at_their_scales_too(kind):
    packed, scale, *_ = random_case("int4", 8, 64)
    with pytest.raises(ValueError, match=r"\[8, 1\].*\[8, 2\]"):
        kind(packed, scale[:, :1], "int4")


def test_a_packed_linear_on_a_cpu():
    packed, scale, *_ = random_case("int4", 32, 64)
    with pytest.raises(ValueError, match="CUDA device.*on cpu"):
        PackedLinear(packed, scale, "int4")


def test_dimensions_of_fp8_at_the_edge():
    packed, scale, *_ = random_case("fp8", 130, 192)
    assert stored_misfit(packed, scale, "fp8", experts=False) is None
    assert "[2, 2]" in stored_misfit(packed, scale[:1], "fp8", experts=False)
