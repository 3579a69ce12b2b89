"""A rotation that all routed experts of a layer share: engine against transformers, and against the trainer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_models import ATTENTION, Reference, random_version, write_checkpoint
from engine_setup import BLOCK, Bench, both_kinds, make_engine
from torch import nn

from orbit_cli.adapters.bundle import make_version
from orbit_cli.errors import EngineError
from orbit_cli.models.build import build_model
from orbit_cli.sglang_plugin import rotation, shared_experts
from orbit_cli.sglang_plugin.room import AdapterRoom
from orbit_cli.sglang_plugin.slots import BatchSlots
from orbit_cli.types import AdapterSpec, SampleRequest, SamplingParams

EXACT, DIFFERENT = 1e-4, 2e-2
PROMPT = list(range(7, 40))
GATE_UP = ("gate_proj", "up_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS = {"qwen3_moe": (ATTENTION, ("self_attn", "experts")), "deepseek_v3": (LATENT, ("mlp",))}


@pytest.fixture(scope="module", params=MODELS)
def bench(request, tmp_path_factory):
    """INT4 experts; deepseek_v3 also has a shared expert, which the rotation must not reach."""
    targets, quantised = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(folder / "base", request.param, quantised=quantised)
    spec = both_kinds(targets, GATE_UP, "shared")
    with make_engine(folder / "base", spec, folder / "log") as engine:
        yield Bench(folder / "base", engine, Reference(model), spec)


def ask(bench, numbers, tokens=10):
    params = SamplingParams(max_new_tokens=tokens)
    return bench.engine.generate(
        [SampleRequest(token_ids=PROMPT, params=params, version=n, seed=i) for i, n in enumerate(numbers)]
    )


def alone(version):
    """Only the experts' rotations."""
    return make_version(version.number, version.spec, {n: t for n, t in version.tensors.items() if ".experts." in n})


def test_versions_in_one_batch_are_each_the_reference(bench):
    latent = bench.reference.model.config.model_type == "deepseek_v3"  # whose kv_b_proj takes no LoRA
    versions = [None, *(bench.version(kind) for kind in (["oft", "oft"] if latent else ["oft", "oft", "lora"]))]
    assert sum(".experts." in name for name in versions[1].tensors) == (1 if latent else 2)  # one for each MoE layer
    for version in versions[1:]:
        assert bench.engine.publish(version).checksum == version.checksum
    for own, completion in zip(versions, ask(bench, [v and v.number for v in versions]), strict=True):
        assert bench.reference.gap(PROMPT, completion, own) < EXACT
        assert min(bench.reference.gap(PROMPT, completion, other) for other in versions if other is not own) > DIFFERENT
    bench.clear()


def test_the_rotations_alone_act(bench):
    one, two = alone(bench.version()), alone(bench.version())
    assert all(name.endswith(".mlp.experts.gate_up_proj.oft_R") for name in one.tensors)
    for version in (one, two):
        bench.engine.publish(version)
    for own, completion in zip((one, None, two), ask(bench, [one.number, None, two.number]), strict=True):
        assert bench.reference.gap(PROMPT, completion, own) < EXACT
        others = [v for v in (one, None, two) if v is not own]
        assert min(bench.reference.gap(PROMPT, completion, other) for other in others) > EXACT * 10
    bench.clear()


def test_engine_equals_trainer_through_swaps(bench):
    """The trainer's own model and bytes: two versions in one batch, then one in place of the other."""
    spec = AdapterSpec(
        kind="oft", targets=bench.spec.targets, expert_targets=GATE_UP, expert_width="shared", block_size=BLOCK,
        neumann_terms=6,
    )  # fmt: skip
    model = build_model(bench.folder, spec, layers=[], device="cpu", dtype=torch.float32, seed=0)
    with model.disabled():
        base = scores(model, PROMPT)
    rounding = gap(base, bench.engine.score([PROMPT], None)[0])  # deepseek_v3: 8e-6 without any adapter
    wanted, completions, seen = {}, {}, []
    limit = max(1e-5, 1.5 * rounding)
    assert rounding < 2e-5
    first = bench.numbers + 1
    bench.numbers += 3
    for number in (first, first + 1, first + 2):
        model.bank.randomize(number, 0.05)
        version = model.bank.version(number)
        assert bench.engine.publish(version).checksum == version.checksum
        seen.append(version.checksum)
        wanted[number] = scores(model, PROMPT)
        if number == first + 1:  # both at once
            completions = dict(zip((first, number), ask(bench, [first, number]), strict=True))
            for own, completion in completions.items():
                assert completion.versions == [own] * len(completion.token_ids)
        assert gap(bench.engine.score([PROMPT], number)[0], wanted[number]) < limit
    assert len(set(seen)) == 3
    model.bank.randomize(first, 0.05)
    sampled = completions[first]
    own = scores(model, PROMPT + sampled.token_ids)[len(PROMPT) - 1 :]
    assert gap(own, sampled.logprobs) < limit
    assert min(gap(base, wanted[first]), gap(wanted[first], wanted[first + 1])) > DIFFERENT
    bench.clear()


def gap(found: list[float], wanted: list[float]) -> float:
    """Mean |difference| of log-probs, as `orbit sync-test` counts it."""
    return sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(wanted)


@torch.no_grad()
def scores(model, tokens: list[int]) -> list[float]:
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 0] = False
    found, _ = model.logprobs(ids, torch.tensor([len(tokens)]), mask, temperature=1.0, chunk=64)
    return found[0, 1:].tolist()


def test_a_version_of_the_other_width_is_refused(bench):
    spec = both_kinds(bench.spec.targets, GATE_UP)
    each = random_version(900, spec, bench.reference.model, kind="oft")
    with pytest.raises(EngineError, match=r"experts\.0\.gate_proj\.oft_R, which names no adapted linear"):
        bench.engine.publish(alone(each))


def test_two_ranks_hold_the_whole_rotation(tmp_path):
    spec = both_kinds(ATTENTION, GATE_UP, "shared")
    model = write_checkpoint(tmp_path / "moe", "qwen3_moe", quantised=("experts",))
    version = random_version(1, spec, model, kind="oft")
    with make_engine(tmp_path / "moe", spec, tmp_path / "log", tensor_parallel=2) as engine:
        assert engine.publish(version).checksum == version.checksum
        bench = Bench(tmp_path / "moe", engine, Reference(model), spec)
        for own, completion in zip((None, version), ask(bench, [None, 1]), strict=True):
            assert bench.reference.gap(PROMPT, completion, own) < EXACT


# The method alone, on both paths ------------------------------------------------------------------------------------


class Experts:
    """A quant method that says what it was given."""

    def apply(self, layer, dispatch_output):
        return dispatch_output


@pytest.mark.parametrize("on_gpu", [True, False])
def test_tokens_are_turned_by_their_own_slot_and_never_in_place(monkeypatch, on_gpu):
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput

    monkeypatch.setattr(shared_experts, "rotate_slots", rotation.rotate_slots_reference)
    slots = BatchSlots(torch.device("cpu"))
    layer = nn.Linear(4, 4)
    layer.moe_ep_size, layer.hidden_size, layer.quant_method = 1, 48, Experts()
    layer.moe_runner_config = SimpleNamespace(params_dtype=torch.float32)
    room = AdapterRoom(targets=(), expert_targets=GATE_UP, block_size=16, rank=0, versions=2, expert_width="shared")
    method = shared_experts.SharedExpertsMethod(layer, "m.layers.0.mlp.experts", room, slots)
    assert method.rotations.shape == (3, 1, 3, 16, 16)
    name = "m.layers.0.mlp.experts.gate_up_proj.oft_R"
    assert method.expected("oft", room) == {name: (3, 16, 16)} and method.expected("lora", room) == {}
    turns = {slot: torch.randn(3, 16, 16).bfloat16() for slot in (1, 2)}
    for slot, tensor in turns.items():
        method.write(slot, "oft", {name: tensor}, 1.0)
        assert torch.equal(method.held(slot, {name})[name], tensor) and method.held(slot, {"other"}) == {}
    per_token = [2, 0, 1, 1, 2, 0, 1]
    slots.set(per_token, None)
    if on_gpu:
        slots.on_gpu, slots.token_slot = True, torch.tensor([*per_token, 2, 2], dtype=torch.int32)
    x = torch.randn(7, 48)
    before, topk = x.clone(), object()
    given = StandardDispatchOutput(
        hidden_states=x, hidden_states_scale=None, topk_output=topk, hidden_states_pre_quant=(x, x)
    )
    found = method.apply(layer, given)
    assert torch.equal(x, before) and found.topk_output is topk and found.hidden_states_pre_quant is None
    for row, slot in enumerate(per_token):
        own = torch.block_diag(*turns[slot].double()) if slot else torch.eye(48, dtype=torch.float64)
        torch.testing.assert_close(found.hidden_states[row].double(), x[row].double() @ own, rtol=1e-5, atol=2e-5)
    for slot in turns:
        method.clear(slot)
    assert torch.equal(method.apply(layer, given).hidden_states, x)
    with pytest.raises(ValueError, match="quantised before a shared rotation"):
        method.apply(layer, given._replace(hidden_states_scale=x))
