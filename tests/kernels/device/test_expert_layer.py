"""The expert layer on kernels against autograd through the PyTorch reference in float64, and its surroundings."""

import pytest
import torch
from kernel_device import DEVICE, DTYPE, INTERPRETED, relative_error, tolerance, values
from random_weights import random_case
from torch import library

from orbit_kernels import lora_sweep
from orbit_kernels.expert_layer import expert_layer
from orbit_kernels.experts import ExpertAdapters, StackedAdapter, frozen_experts
from orbit_kernels.grouped import PackedExperts

EXPERTS, SLOTS, BLOCK, RANK = 4, 2, 32, 8
HIDDEN, INTER, TOKENS = (64, 64, 5) if INTERPRETED else (1536, 512, 150)
KINDS = ("small_oft", "up_low", "both", "lora") + (() if INTERPRETED else ("none", "oft", "gate_only", "mixed"))
FORMATS = ("fp8",) if INTERPRETED else ("mxfp4", "nvfp4", "fp8", "bf16")  # the products have tests of their own


def random_layer(fmt: str):
    """(w13, w2) on the device with modest values; gate and up of FP8 have scale blocks of their own."""
    pair = []
    for outputs, inputs, parts in ((2 * INTER, HIDDEN, 2), (HIDDEN, INTER, 1)):
        packed, scale, global_scale, _ = random_case(fmt, outputs, inputs, (EXPERTS,))
        if fmt == "int4":
            scale = scale * 0.02
        elif fmt == "mxfp4":
            scale = scale - 8
        elif fmt == "fp8":
            scale = torch.rand(EXPERTS, parts * -(-outputs // parts // 128), -(-inputs // 128)) * 1e-3 + 1e-4
        elif fmt == "nvfp4":
            global_scale = global_scale * 20
        else:
            packed = packed * 0.1
        move = [None if t is None else t.to(DEVICE) for t in (packed, scale, global_scale)]
        pair.append(PackedExperts(packed=move[0], scale=move[1], fmt=fmt, global_scale=move[2], parts=parts))
    return pair


def leaf(*shape: int, scale: float = 0.1) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(torch.bfloat16).to(DTYPE).to(DEVICE).requires_grad_()


def rotations(inputs: int, block: int) -> torch.Tensor:
    turned = torch.linalg.qr(torch.randn(EXPERTS, inputs // block, block, block))[0]
    return turned.to(torch.bfloat16).to(DTYPE).to(DEVICE).requires_grad_()


def build_adapter(kind: str) -> ExpertAdapters | None:
    def stack(inputs: int, outputs: int) -> StackedAdapter:
        turn = rotations(inputs, 16 if kind == "small_oft" else BLOCK) if kind not in ("lora", "up_low") else None
        has_low = kind in ("lora", "both", "up_low")
        low = (leaf(EXPERTS, RANK, inputs), leaf(EXPERTS, outputs, RANK)) if has_low else (None, None)
        return StackedAdapter(rotation=turn, lora_a=low[0], lora_b=low[1], scaling=1.5)

    if kind == "none":
        return None
    if kind == "gate_only":
        return ExpertAdapters(gate=stack(HIDDEN, INTER))
    if kind == "up_low":
        return ExpertAdapters(up=stack(HIDDEN, INTER))
    if kind == "mixed":  # LoRA above, a rotation below
        above, below = build_adapter("lora"), build_adapter("oft")
        return ExpertAdapters(gate=above.gate, up=above.up, down=below.down)
    return ExpertAdapters(gate=stack(HIDDEN, INTER), up=stack(HIDDEN, INTER), down=stack(INTER, HIDDEN))


def tensors_of(adapter: ExpertAdapters | None) -> list[torch.Tensor]:
    stacks = [adapter.gate, adapter.up, adapter.down] if adapter else []
    found = [(s.rotation, s.lora_a, s.lora_b) for s in stacks if s is not None]
    return [tensor for group in found for tensor in group if tensor is not None]


def in_float64(adapter: ExpertAdapters | None) -> ExpertAdapters | None:
    return replace_tensors(adapter, lambda t: t.detach().double().requires_grad_())


def replace_tensors(adapter: ExpertAdapters | None, change) -> ExpertAdapters | None:
    def copy(stack: StackedAdapter | None) -> StackedAdapter | None:
        if stack is None:
            return None
        wide = [None if t is None else change(t) for t in (stack.rotation, stack.lora_a, stack.lora_b)]
        return StackedAdapter(rotation=wide[0], lora_a=wide[1], lora_b=wide[2], scaling=stack.scaling)

    return (
        None
        if adapter is None
        else ExpertAdapters(gate=copy(adapter.gate), up=copy(adapter.up), down=copy(adapter.down))
    )


def random_input():
    """x, ids without expert 2, weights, dy."""
    ids = torch.stack([torch.tensor([0, 1, 3])[torch.randperm(3)[:SLOTS]] for _ in range(TOKENS)]).to(DEVICE)
    return values(TOKENS, HIDDEN).mul_(0.3), ids, torch.rand(TOKENS, SLOTS).to(DTYPE).to(DEVICE), values(TOKENS, HIDDEN)


def reference(x, ids, weights, w13, w2, adapter, path="reference"):
    return frozen_experts(
        x, ids, weights, w13.packed, w13.scale, w2.packed, w2.scale, w13.fmt, adapter,
        w13.global_scale, w2.global_scale,
        path=path, routing_gradient=True,
    )  # fmt: skip


CASES = [(kind, "int4") for kind in KINDS] + [("both", fmt) for fmt in FORMATS]


@pytest.mark.parametrize("kind, fmt", CASES)
def test_values_and_gradients_against_the_reference(kind, fmt):
    w13, w2 = random_layer(fmt)
    adapter = build_adapter(kind)
    wide = in_float64(adapter)
    x, ids, weights, dy = random_input()
    x.requires_grad_()
    x64 = x.detach().double().requires_grad_()
    weights.requires_grad_()
    weights64 = weights.detach().double().requires_grad_()
    y = expert_layer(x, ids, weights, w13, w2, adapter, routing_gradient=True)
    found = torch.autograd.grad(y, [x, weights, *tensors_of(adapter)], dy)
    expected = reference(x64, ids, weights64, w13, w2, wide)
    wanted = torch.autograd.grad(expected, [x64, weights64, *tensors_of(wide)], dy.double())
    assert relative_error(y, expected.detach()) < tolerance(4)
    for actual, exact in zip(found, wanted, strict=True):
        assert actual.shape == exact.shape and relative_error(actual, exact) < tolerance(6)


@pytest.mark.parametrize("path", ["kernels", "chunked"])
def test_the_one_entry_runs_it(path):
    w13, w2 = random_layer("int4")
    x, ids, weights, _ = random_input()
    budget = 1 << 30 if path == "chunked" else 0
    y = reference(x, ids, weights, w13, w2, None, path=path)
    assert torch.equal(y, expert_layer(x, ids, weights, w13, w2, chunk_budget=budget))
    if INTERPRETED:  # a GPU is not asked what the ids say
        with pytest.raises(ValueError, match=rf"holds -1.*0 to {EXPERTS - 1}"):
            reference(x, ids - 1, weights, w13, w2, None, path=path)
    with pytest.raises(ValueError, match=f"path='{path}' cannot run: x is torch.float64"):
        reference(x.double(), ids, weights, w13, w2, None, path=path)


@pytest.mark.parametrize("fmt", ["fp8"] if INTERPRETED else ["int4", "fp8"])
def test_by_way_of_decoded_chunks(fmt):
    w13, w2 = random_layer(fmt)
    adapter = build_adapter("both")
    x, ids, weights, dy = random_input()
    x.requires_grad_()
    results = []
    for budget in (0, 4 * HIDDEN * 2 * INTER * x.element_size()):
        y = expert_layer(x, ids, weights, w13, w2, adapter, chunk_budget=budget)
        results.append((y, *torch.autograd.grad(y, [x, *tensors_of(adapter)], dy)))
    for packed, chunked in zip(*results, strict=True):
        assert relative_error(chunked, packed) < tolerance(8)


def test_recomputing_the_hidden_state_changes_no_bit_and_saves_it():
    w13, w2 = random_layer("int4")
    adapter = build_adapter("both")
    x, ids, weights, dy = random_input()
    results, saved = [], []
    for recompute in (False, True):
        kept = []
        own = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            y = expert_layer(own, ids, weights, w13, w2, adapter, recompute=recompute)
        results.append((y, *torch.autograd.grad(y, [own, *tensors_of(adapter)], dy)))
        rows = TOKENS * SLOTS
        saved.append(any(t.dim() == 2 and t.shape == (rows, 2 * INTER) for t in kept))
        assert not any(t.dim() >= 2 and t.shape[-2:] == (rows, HIDDEN) for t in kept)  # no permuted copy of x
    assert saved == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_runs_repeat_bit_for_bit():
    w13, w2 = random_layer("int4")
    adapter = build_adapter("both")
    x, ids, weights, dy = random_input()
    x.requires_grad_()
    runs = []
    for _ in range(2):
        y = expert_layer(x, ids, weights, w13, w2, adapter)
        runs.append((y, *torch.autograd.grad(y, [x, *tensors_of(adapter)], dy)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def asking_for_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf as a trainer holds it: bfloat16 numbers, gradients in float32."""
    held = tensor.detach().to(torch.bfloat16).requires_grad_()
    held.grad_dtype = torch.float32
    return held


@pytest.mark.parametrize("kind", ["lora", "small_oft", "both"])
def test_a_trainers_leaves_get_gradients_that_no_rounding_touched(kind):
    """BF16 leaves that ask for float32, and float32 leaves of BF16 values: the same bits but for the last rounding."""
    w13, w2 = random_layer("int4")
    adapter = build_adapter(kind)
    wide = replace_tensors(adapter, lambda t: t.detach().float().requires_grad_())
    x, ids, weights, dy = random_input()
    x.requires_grad_()
    results = []
    for own in (adapter, wide, replace_tensors(adapter, asking_for_float32)):
        y = expert_layer(x, ids, weights, w13, w2, own)
        results.append((y, *torch.autograd.grad(y, [x, *tensors_of(own)], dy)))
    rounded, float32, held = results
    assert all(gradient.dtype == torch.float32 for gradient in (*float32[2:], *held[2:]))
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(rounded, float32, strict=True))
    for a, b in zip(float32, held, strict=True):  # numpy sums in an order of its own where another kernel is taken
        assert relative_error(a, b) < 1e-5 if INTERPRETED else torch.equal(a, b)


@pytest.mark.parametrize("kind", ["lora", "both"])
def test_experts_with_few_rows_and_with_many_take_other_kernels(kind, monkeypatch):
    """Forward bit for bit the same ones, backward the same sums in another order."""
    w13, w2 = random_layer("int4")
    adapter = replace_tensors(build_adapter(kind), lambda t: t.detach().float().requires_grad_())
    x, ids, weights, dy = random_input()
    x.requires_grad_()
    results = []
    for fewest in (0, 1 << 30):
        monkeypatch.setattr(lora_sweep, "FEWEST", fewest)
        y = expert_layer(x, ids, weights, w13, w2, adapter)
        results.append((y, *torch.autograd.grad(y, [x, *tensors_of(adapter)], dy)))
    assert torch.equal(results[0][0], results[1][0])
    for many, few in zip(*results, strict=True):
        assert relative_error(many, few) < tolerance(6)


def test_activation_checkpointing_gives_the_same_gradients():
    w13, w2 = random_layer("int4")
    x, ids, weights, dy = random_input()
    x.requires_grad_()
    plain = torch.autograd.grad(expert_layer(x, ids, weights, w13, w2), x, dy)[0]
    again = torch.utils.checkpoint.checkpoint(lambda x: expert_layer(x, ids, weights, w13, w2), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, x, dy)[0], plain)


def test_the_operator_has_a_fake_twin():
    """What torch.compile relies on: shapes and dtypes without data, in both passes."""
    w13, w2 = random_layer("int4")
    adapter = build_adapter("both")
    x, ids, weights, _ = random_input()
    stacks = [getattr(s, n) for s in (adapter.gate, adapter.up, adapter.down) for n in ("rotation", "lora_a", "lora_b")]
    arguments = (
        x, ids, weights, w13.packed, w13.scale, None, w2.packed, w2.scale, None, "int4",
        *[t.detach().requires_grad_() for t in stacks], [1.5] * 3, None, False, 0, False, True,
    )  # fmt: skip
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    library.opcheck(torch.ops.orbit_kernels.expert_layer.default, arguments, test_utils=tests)


def test_no_tokens():
    w13, w2 = random_layer("int4")
    x = torch.empty(0, HIDDEN, dtype=DTYPE, device=DEVICE, requires_grad=True)
    ids, weights = torch.empty(0, SLOTS, dtype=torch.long, device=DEVICE), torch.empty(0, SLOTS, device=DEVICE)
    y = expert_layer(x, ids, weights, w13, w2, build_adapter("both"))
    assert torch.autograd.grad(y.sum(), x)[0].shape == (0, HIDDEN)
