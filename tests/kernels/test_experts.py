"""Routed experts against a dense float64 reference with merged adapters, token by token and slot by slot."""

import pytest
import torch
from random_weights import random_case

from orbit_kernels.decode import FORMATS
from orbit_kernels.experts import ExpertAdapters, ProjectionAdapter, StackedAdapter, expert_mlp, frozen_experts

EXPERTS, HIDDEN, INTER, BLOCK, RANK = 6, 64, 32, 16, 4


def random_layer(fmt: str):
    """(arguments of frozen_experts, w13, w2 in float64); FP8's gate and up halves have their own scale blocks."""
    gate, up, w2 = (random_case(fmt, n, k, (EXPERTS,)) for n, k in ((INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER)))
    if fmt == "nvfp4":  # gate and up share one global scale
        up = (up[0], up[1], gate[2], up[3] * (up[2] / gate[2]).double().unsqueeze(-1))
    shrink = 0.05
    w13_scale = None if gate[1] is None else torch.cat((gate[1], up[1]), 1)
    arguments = {
        "w13_packed": torch.cat((gate[0].view(torch.uint8), up[0].view(torch.uint8)), 1).view(gate[0].dtype),
        "w13_scale": w13_scale,
        "w2_packed": w2[0],
        "w2_scale": w2[1],
        "fmt": fmt,
    }
    if fmt == "nvfp4":
        arguments |= {"w13_global_scale": gate[2], "w2_global_scale": w2[2]}
    return arguments, torch.cat((gate[3], up[3]), 1), w2[3], shrink


def random_routing(tokens: int, slots: int, allowed: list[int]):
    ids = torch.stack([torch.tensor(allowed)[torch.randperm(len(allowed))[:slots]] for _ in range(tokens)])
    return ids, torch.rand(tokens, slots)


def rotations(inputs: int) -> torch.Tensor:
    """Random orthogonal blocks [E, inputs/b, b, b] in float64."""
    return torch.linalg.qr(torch.randn(EXPERTS, inputs // BLOCK, BLOCK, BLOCK, dtype=torch.float64))[0]


def merged(weight: torch.Tensor, adapter: StackedAdapter | None, expert: int) -> torch.Tensor:
    """W R^T + scaling * B A of one expert, float64 and differentiable in the adapter."""
    if adapter is None:
        return weight
    if adapter.rotation is not None:
        weight = weight @ torch.block_diag(*adapter.rotation[expert]).T
    if adapter.lora_a is not None:
        weight = weight + adapter.scaling * adapter.lora_b[expert] @ adapter.lora_a[expert]
    return weight


def dense_reference(x, ids, weights, w13, w2, adapter: ExpertAdapters | None):
    adapter = adapter or ExpertAdapters()
    rows = []
    for token in range(len(x)):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            gate = merged(w13[e, :INTER], adapter.gate, e) @ x[token]
            up = merged(w13[e, INTER:], adapter.up, e) @ x[token]
            down = merged(w2[e], adapter.down, e)
            total = total + weights[token, slot] * (down @ (gate * torch.sigmoid(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def lora(inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(EXPERTS, RANK, inputs, dtype=torch.float64) * 0.1
    return a, torch.randn(EXPERTS, outputs, RANK, dtype=torch.float64) * 0.1


def build_adapter(kind: str | None) -> tuple[ExpertAdapters | None, list[torch.Tensor]]:
    """(adapter, its leaf tensors, which require gradients)."""
    if kind is None:
        return None, []
    if kind == "oft":
        leaves = [rotations(HIDDEN), rotations(HIDDEN), rotations(INTER)]
        stacks = [StackedAdapter(rotation=leaf.requires_grad_()) for leaf in leaves]
    elif kind == "gate_only":
        leaves = [rotations(HIDDEN)]
        stacks = [StackedAdapter(rotation=leaves[0].requires_grad_()), None, None]
    else:
        pairs = [lora(HIDDEN, INTER), lora(HIDDEN, INTER), lora(INTER, HIDDEN)]
        leaves = [leaf.requires_grad_() for pair in pairs for leaf in pair]
        stacks = [StackedAdapter(lora_a=a, lora_b=b, scaling=1.7) for a, b in pairs]
    return ExpertAdapters(gate=stacks[0], up=stacks[1], down=stacks[2]), leaves


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", [None, "oft", "lora", "gate_only"])
def test_values_and_gradients_against_the_dense_reference(fmt, kind):
    arguments, w13, w2, shrink = random_layer(fmt)
    adapter, leaves = build_adapter(kind)
    ids, weights = random_routing(9, 2, [0, 1, 3, 5])  # experts 2 and 4 get no token
    x = (torch.randn(9, HIDDEN, dtype=torch.float64) * shrink).requires_grad_()
    dy = torch.randn(9, HIDDEN, dtype=torch.float64)

    y = frozen_experts(x, ids, weights, **arguments, adapter=adapter)
    gradients = torch.autograd.grad(y, [x, *leaves], dy)
    expected = dense_reference(x, ids, weights.double(), w13, w2, adapter)
    wanted = torch.autograd.grad(expected, [x, *leaves], dy)

    rtol = 1e-6 if fmt == "nvfp4" else 1e-9  # nvfp4: the reference rescales `up` to the shared global scale in float32
    for actual, reference in zip([y, *gradients], [expected, *wanted], strict=True):
        assert (actual - reference).abs().max() <= rtol * reference.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_the_reference(dtype):
    arguments, w13, w2, shrink = random_layer("int4")
    adapter, _ = build_adapter("oft")
    ids, weights = random_routing(16, 2, list(range(EXPERTS)))
    x = (torch.randn(16, HIDDEN, dtype=torch.float64) * shrink).to(dtype)
    with torch.no_grad():
        y = frozen_experts(x, ids, weights, **arguments, adapter=adapter)
        expected = dense_reference(x.double(), ids, weights.double(), w13, w2, adapter)
    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max()


def test_routing_weights_get_no_gradient_unless_asked_for():
    arguments, w13, w2, _ = random_layer("int4")
    ids, weights = random_routing(3, 2, [0, 1])
    weights = weights.double().requires_grad_()
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    frozen_experts(x, ids, weights, **arguments).sum().backward()
    assert weights.grad is None
    y = frozen_experts(x, ids, weights, **arguments, routing_gradient=True)
    wanted = torch.autograd.grad(dense_reference(x, ids, weights, w13, w2, None).sum(), weights)[0]
    found = torch.autograd.grad(y.sum(), weights)[0]
    assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


@pytest.mark.parametrize("kind", [None, "oft", "lora", "gate_only"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("slots", [2, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_make_no_rows_and_zero_gradients(kind, fmt, slots, dtype):
    arguments, *_ = random_layer(fmt)
    adapter, leaves = build_adapter(kind)
    x = torch.randn(0, HIDDEN, dtype=dtype, requires_grad=True)
    ids, weights = torch.empty(0, slots, dtype=torch.long), torch.empty(0, slots, requires_grad=True)
    y = frozen_experts(x, ids, weights, **arguments, adapter=adapter, routing_gradient=True)
    assert y.shape == (0, HIDDEN) and y.dtype == dtype
    found = torch.autograd.grad(y.sum(), [x, weights, *leaves])
    assert [g.shape for g in found] == [t.shape for t in (x, weights, *leaves)]
    assert not any(g.any() for g in found)


def test_result_of_a_token_does_not_depend_on_the_order_of_tokens():
    arguments, *_ = random_layer("int4")
    ids, weights = random_routing(12, 3, list(range(EXPERTS)))
    x = torch.randn(12, HIDDEN, dtype=torch.float64)
    order = torch.randperm(12)
    y = frozen_experts(x, ids, weights, **arguments)
    shuffled = frozen_experts(x[order], ids[order], weights[order], **arguments)
    assert (shuffled - y[order]).abs().max() <= 1e-12 * y.abs().max()


def test_one_expert_with_its_own_adapter_as_an_engine_calls_it():
    arguments, w13, w2, shrink = random_layer("int4")
    adapter, _ = build_adapter("oft")
    rows = torch.randn(5, HIDDEN, dtype=torch.float64) * shrink
    y = expert_mlp(
        rows,
        arguments["w13_packed"][3],
        arguments["w13_scale"][3],
        arguments["w2_packed"][3],
        arguments["w2_scale"][3],
        "int4",
        gate_adapter=ProjectionAdapter(rotation=adapter.gate.rotation[3]),
        up_adapter=ProjectionAdapter(rotation=adapter.up.rotation[3]),
        down_adapter=ProjectionAdapter(rotation=adapter.down.rotation[3]),
    )
    expected = dense_reference(rows, torch.full((5, 1), 3), torch.ones(5, 1).double(), w13, w2, adapter)
    assert (y - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_what_does_not_fit_is_refused_with_its_reason():
    arguments, *_ = random_layer("int4")
    ids, weights = random_routing(3, 2, [0, 1])
    x = torch.randn(3, HIDDEN)
    with pytest.raises(ValueError, match=f"hidden columns.*{HIDDEN}"):
        frozen_experts(x[:, :32], ids, weights, **arguments)
    with pytest.raises(ValueError, match=r"must both be \[3, slots\]"):
        frozen_experts(x, ids[:2], weights, **arguments)
    with pytest.raises(ValueError, match="of two layers"):
        other = {name: arguments[name][:, :INTER] for name in ("w13_packed", "w13_scale")}
        frozen_experts(x, ids, weights, **(arguments | other))
    with pytest.raises(ValueError, match="none of auto"):
        frozen_experts(x, ids, weights, **arguments, path="fast")


@pytest.mark.parametrize("kind", ["rotation", "lora"])
def test_leaves_in_bfloat16_get_float32_gradients_that_no_rounding_touched(kind):
    """Of the layer, and of one expert that is called by itself: as float32 leaves of the same values, to the bit."""
    arguments, *_ = random_layer("int4")
    ids, weights = random_routing(7, 2, [0, 2, 5])
    x = torch.randn(7, HIDDEN)

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(EXPERTS, *shape) * 0.1).to(torch.bfloat16)

    values = [leaf(HIDDEN // BLOCK, BLOCK, BLOCK)] if kind == "rotation" else [leaf(RANK, HIDDEN), leaf(INTER, RANK)]
    names = ("rotation",) if kind == "rotation" else ("lora_a", "lora_b")
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [value.to(dtype, copy=True).requires_grad_() for value in values]
        for own in leaves:
            own.grad_dtype = torch.float32
        adapter = ExpertAdapters(gate=StackedAdapter(**dict(zip(names, leaves, strict=True))))
        frozen_experts(x, ids, weights, **arguments, adapter=adapter).sin().sum().backward()
        gradients = [own.grad for own in leaves]
        single = [value[2].to(dtype, copy=True).requires_grad_() for value in values]
        for own in single:
            own.grad_dtype = torch.float32
        one = {name: None if arguments[name] is None else arguments[name][2] for name in arguments if name != "fmt"}
        gate = ProjectionAdapter(**dict(zip(names, single, strict=True)))
        expert_mlp(x, **one, fmt="int4", gate_adapter=gate).sin().sum().backward()
        found.append([*gradients, *(own.grad for own in single)])
    assert all(g.dtype == torch.float32 and g.norm() > 0 for g in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
