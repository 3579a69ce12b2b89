"""The plugin's own arithmetic without an engine: sampling, batched attention, rotations, buckets, GPU slots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orbit_cli.sglang_plugin import groups, linear, rotation, sampler
from orbit_cli.sglang_plugin.bucket import pack, unpack
from orbit_cli.sglang_plugin.cpu.attention import attend, plan
from orbit_cli.sglang_plugin.groups import mark_followers
from orbit_cli.sglang_plugin.room import AdapterRoom
from orbit_cli.sglang_plugin.slots import BatchSlots

# Sampling -----------------------------------------------------------------------------------------------------------


def test_uniforms_are_uniform_independent_and_reproducible():
    seeds, positions = torch.arange(2000), torch.arange(50)
    grid = sampler.uniforms(seeds.repeat_interleave(50), positions.repeat(2000)).view(2000, 50)
    assert torch.equal(grid, sampler.uniforms(seeds.repeat_interleave(50), positions.repeat(2000)).view(2000, 50))
    assert float(grid.min()) >= 0.0 and float(grid.max()) < 1.0
    assert grid.unique().numel() == grid.numel()
    counts = torch.histc(grid.float(), bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 160  # chi-square with 99 degrees: 4 sigma
    centred = grid - 0.5
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(float(shifted.mean())) * 12 * shifted.numel() ** 0.5 < 4


def test_large_and_negative_seeds_are_kept_apart():
    seeds = torch.tensor([0, 1, 2**62, 2**63 - 1, -1, 2**32])
    assert sampler.uniforms(seeds, torch.zeros(6)).unique().numel() == 6


@pytest.mark.parametrize("vocabulary", [5, 128, 1000])
def test_pick_follows_the_distribution(vocabulary):
    probs = torch.softmax(torch.randn(vocabulary) * 2, 0)
    draws = 40000
    u = sampler.uniforms(torch.arange(draws), torch.zeros(draws))
    tokens = sampler.pick(probs.expand(draws, -1), u)
    counts, expected = torch.bincount(tokens, minlength=vocabulary).double(), probs.double() * draws
    rare = expected < 25  # counted together: a single draw of a rare token is many standard deviations
    found = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    wanted = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    sigma = (wanted * (1 - wanted / draws)).clamp(min=1.0).sqrt()
    assert float(((found - wanted).abs() / sigma).max()) < 5.5


def test_pick_is_the_inverse_transform_and_never_takes_a_zero():
    probs = torch.softmax(torch.randn(64, 777) * 3, -1)
    probs[:, 300:500] = 0
    u = torch.rand(64, dtype=torch.float64)
    tokens = sampler.pick(probs, u)
    levels = probs.double().cumsum(-1)
    own = levels.gather(1, tokens.unsqueeze(1)).squeeze(1)
    target = u * levels[:, -1]
    assert torch.all(own > target - 1e-6)
    assert torch.all(own - probs.double().gather(1, tokens.unsqueeze(1)).squeeze(1) < target + 1e-6)
    edge = sampler.pick(probs, torch.full((64,), 1.0 - 2.0**-53, dtype=torch.float64))
    for found in (tokens, edge, sampler.pick(probs, torch.zeros(64, dtype=torch.float64))):
        assert torch.all(probs.gather(1, found.unsqueeze(1)) > 0)


def test_truncation_keeps_what_top_k_and_top_p_keep():
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    kept, ids = sampler.truncate(probs, torch.tensor([2, 1 << 30]), torch.tensor([1.0, 0.65]))
    assert kept.tolist() == [pytest.approx([0.4, 0.3, 0, 0]), pytest.approx([0.4, 0.3, 0, 0])]
    assert ids[:, :2].tolist() == [[0, 1], [3, 2]]


# Attention ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "key_heads", "value_size"), [(4, 4, 16), (6, 2, 16), (4, 1, 8)])
def test_batched_attention_is_attention_of_each_request(heads, key_heads, value_size):
    size, slots = 16, 400
    lengths = [1, 7, 33, 40, 40, 5, 90]
    queries = [1, 7, 1, 1, 12, 2, 31]
    k_cache, v_cache = torch.randn(slots, key_heads, size), torch.randn(slots, key_heads, value_size)
    table = torch.stack([torch.randperm(slots)[:100] for _ in range(10)]).int()
    pool = torch.tensor([3, 1, 9, 0, 5, 2, 7])
    query = torch.randn(sum(queries), heads, size)
    output = torch.full((sum(queries), heads, value_size), float("nan"))
    attend(plan(table, pool, lengths, queries, heads // key_heads), query, output, k_cache, v_cache, 0.3)
    start = 0
    for request, length, count in zip(pool.tolist(), lengths, queries, strict=True):
        where = table[request, :length].long()
        keys = k_cache[where].double().repeat_interleave(heads // key_heads, 1)
        values = v_cache[where].double().repeat_interleave(heads // key_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count].double(), keys) * 0.3
        past = torch.arange(length) <= torch.arange(length - count, length).unsqueeze(1)
        weights = scores.masked_fill(~past, float("-inf")).softmax(-1)
        want = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(output[start : start + count].double(), want, rtol=1e-5, atol=1e-5)
        start += count


def _request(tokens, matched=0, key="v1"):
    return SimpleNamespace(origin_input_ids=tokens, num_matched_prefix_tokens=matched, extra_key=key)


def _followers(queue, disable=False, active="lpm") -> list[bool]:
    cache = SimpleNamespace(disable=disable)
    policy = SimpleNamespace(tree_cache=cache, policy="lpm", _determine_active_policy=lambda _: active)
    mark_followers(None, policy, queue)
    return [getattr(request, "orbit_follows", False) for request in queue]


def test_requests_wait_for_the_one_that_computes_their_prefix():
    long, other = list(range(60)), list(range(1, 61))
    queue = [_request(long), _request(long), _request(other), _request(long[:40] + [7] * 20), _request(long, key="v2")]
    queue += [_request(long, matched=59), _request([1, 2, 3]), _request([1, 2, 3])]
    assert _followers(queue) == [False, True, False, True, False, False, False, False]
    assert not any(_followers([_request(long), _request(long)], disable=True))


def test_a_long_queue_is_matched_anew_because_sglang_does_not(monkeypatch):
    def match(_cache, queue) -> None:
        for request in queue:
            request.num_matched_prefix_tokens = 59

    monkeypatch.setattr(groups, "_match", match)
    assert sum(_followers([_request(list(range(60))) for _ in range(9)])) == 8
    assert not any(_followers([_request(list(range(60))) for _ in range(9)], active="fcfs"))


def test_nobody_waits_for_a_small_saving():
    short = list(range(12))
    assert not any(_followers([_request(short) for _ in range(4)]))  # 3 x 11 tokens
    assert sum(_followers([_request(short) for _ in range(8)])) == 7  # 7 x 11 tokens


# Rotations ----------------------------------------------------------------------------------------------------------


def _rotations(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


def test_rotating_rows_is_the_block_diagonal_product():
    x, blocks = torch.randn(11, 48), _rotations(2, 3, 16, 16)  # two projections, three blocks
    want = torch.stack([x.double() @ torch.block_diag(*own.double()) for own in blocks])
    found = rotation.rotate_rows(x, blocks.permute(1, 2, 0, 3))
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_rotation_kernel_under_the_interpreter():
    """Triton decides at its import whether it interprets, so the cases run in a process of their own."""
    cases = Path(__file__).with_name("interpreted_rotation.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(cases.parent),
        str(cases),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


# The GPU path of an adapted linear, on a CPU ------------------------------------------------------------------------


class UnquantizedLinearMethod:
    """Named as SGLang's: its weight can be cut by rows."""

    def apply(self, layer, x, bias=None):
        return F.linear(x, layer.weight, bias)


class PackedMethod(UnquantizedLinearMethod):
    """A format whose rows cannot be multiplied alone."""


def _layer(sizes: list[int], inputs: int, method) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(sum(sizes), inputs) / inputs**0.5, requires_grad=False)
    layer.input_size, layer.output_size, layer.params_dtype = inputs, sum(sizes), torch.float32
    layer.quant_method = method
    return layer


@pytest.mark.parametrize("method", [UnquantizedLinearMethod(), PackedMethod()])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_adapted_linear_serves_every_slot_of_a_mixed_batch(monkeypatch, method, on_gpu):
    monkeypatch.setattr(linear, "rotate_slots", rotation.rotate_slots_reference)
    room = AdapterRoom(targets=("q_proj", "v_proj"), expert_targets=(), block_size=16, rank=2, versions=2)
    layer = _layer([32, 16, 16], 48, method)
    slots = BatchSlots(torch.device("cpu"))
    adapted = linear.AdaptedLinearMethod(layer, "m.layers.0.qkv_proj", room, slots, [32, 16, 16])
    oft = {f"m.layers.0.{p}.oft_R": _rotations(3, 16, 16).bfloat16() for p in ("q_proj", "v_proj")}
    lora = {
        "m.layers.0.v_proj.lora_A": torch.randn(2, 48).bfloat16(),
        "m.layers.0.v_proj.lora_B": torch.randn(16, 2).bfloat16(),
    }
    adapted.write(1, "oft", oft, 1.0)
    adapted.write(2, "lora", lora, 0.5)
    per_token = [2, 0, 1, 1, 2, 0, 1]
    slots.set(per_token, None)
    if on_gpu:
        slots.on_gpu, slots.token_slot = True, torch.tensor([*per_token, 2, 2], dtype=torch.int32)
    x, bias = torch.randn(7, 48), torch.randn(64)
    found = adapted.apply(layer, x, bias)
    weight = layer.weight.double()
    for row, slot in enumerate(per_token):
        w = weight.clone()
        if slot == 1:
            w[:32] = w[:32] @ torch.block_diag(*oft["m.layers.0.q_proj.oft_R"].double()).T
            w[48:] = w[48:] @ torch.block_diag(*oft["m.layers.0.v_proj.oft_R"].double()).T
        if slot == 2:
            a, b = (lora[f"m.layers.0.v_proj.lora_{x}"].double() for x in "AB")
            w[48:] += 0.5 * b @ a
        want = F.linear(x[row].double(), w, bias.double())
        torch.testing.assert_close(found[row].double(), want, rtol=1e-5, atol=2e-5)
    for slot, sent in ((1, oft), (2, lora)):
        held = adapted.held(slot, set(sent))
        assert held.keys() == sent.keys() and all(torch.equal(held[name], sent[name]) for name in sent)
        adapted.clear(slot)
    torch.testing.assert_close(adapted.apply(layer, x, bias), F.linear(x, layer.weight, bias))


def test_blocks_that_do_not_divide_the_input_are_refused():
    room = AdapterRoom(targets=("o_proj",), expert_targets=(), block_size=32, rank=0, versions=2)
    with pytest.raises(ValueError, match=r"o_proj has 48 inputs.*blocks of 32 do not divide; set adapter.block_size"):
        layer = _layer([16], 48, PackedMethod())
        linear.AdaptedLinearMethod(layer, "m.layers.0.o_proj", room, BatchSlots(torch.device("cpu")), [16])


# Buckets ------------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_back_what_was_packed():
    tensors = {"b": torch.randn(3, 4).bfloat16(), "a": torch.randn(2, 2, 2).bfloat16(), "c": torch.randn(1).bfloat16()}
    flat, index = pack(tensors)
    assert flat.numel() == 21 and [entry[0] for entry in index] == ["a", "b", "c"]
    found = unpack(flat, index)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([["a", 0, [4]], ["a", 4, [4]]], "names a twice"),
        ([["a", 0, [4]], ["b", 3, [4]]], "b lies at"),
        ([["a", 0, [4]], ["b", 4, [5]]], "b lies at"),
        ([["a", 0, [4]]], "covers 4 of the buffer's 8"),
    ],
)
def test_a_wrong_index_is_refused(index, message):
    with pytest.raises(ValueError, match=message):
        unpack(torch.zeros(8), index)
