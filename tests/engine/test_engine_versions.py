"""Versions side by side on one dense engine: right numbers for each, while they come and go."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from orbit_cli.adapters.bundle import make_version
from orbit_cli.errors import EngineError
from orbit_cli.types import AdapterVersion, FinishReason, SampleRequest, SamplingParams

EXACT = 1e-4  # float32 engine against float32 reference; two versions differ by more than 0.02
DIFFERENT = 2e-2
PROMPT = list(range(5, 45))


def request(version: int | None, *, seed: int = 0, tokens: int = 12, prompt=PROMPT, **params) -> SampleRequest:
    sampling = SamplingParams(max_new_tokens=tokens, **params)
    return SampleRequest(token_ids=prompt, params=sampling, version=version, seed=seed)


def test_base_oft_and_lora_in_one_batch_match_the_reference(dense):
    versions = [None, dense.version("oft"), dense.version("oft"), dense.version("lora")]
    receipts = [dense.engine.publish(version) for version in versions[1:]]
    for version, receipt in zip(versions[1:], receipts, strict=True):
        assert (receipt.version, receipt.checksum) == (version.number, version.checksum)
        assert (receipt.tensors, receipt.nbytes) == (len(version.tensors), version.nbytes)
    numbers = [None if version is None else version.number for version in versions]
    completions = dense.engine.generate([request(n, seed=i) for i, n in enumerate(numbers * 2)])
    for i, completion in enumerate(completions):
        own = versions[i % 4]
        assert completion.versions == [numbers[i % 4]] * 12
        assert dense.reference.gap(PROMPT, completion, own) < EXACT
        others = [dense.reference.gap(PROMPT, completion, other) for other in versions if other is not own]
        assert min(others) > DIFFERENT
    dense.clear()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logprobs_are_those_of_the_tempered_policy(dense, temperature):
    version = dense.version()
    dense.engine.publish(version)
    completion = dense.engine.generate([request(version.number, temperature=temperature)])[0]
    scale = temperature or 1.0
    assert dense.reference.gap(PROMPT, completion, version, scale) < EXACT
    if temperature == 0.0:
        table = dense.reference.logprobs(PROMPT + completion.token_ids, version)[len(PROMPT) - 1 :]
        assert table.argmax(-1).tolist() == completion.token_ids
    else:
        assert dense.reference.gap(PROMPT, completion, version, 1.0) > DIFFERENT
    dense.clear()


def test_truncated_sampling_still_reports_the_full_policy(dense):
    completions = dense.engine.generate(
        [request(None, seed=s, tokens=6, top_k=3) for s in range(8)]
        + [request(None, seed=s, tokens=6, top_p=0.3) for s in range(8)]
    )
    for i, completion in enumerate(completions):
        table = dense.reference.logprobs(PROMPT + completion.token_ids, None)[len(PROMPT) - 1 :]
        for row, token in zip(table, completion.token_ids, strict=True):
            order = row.sort(descending=True)
            rank = int((order.indices == token).nonzero())
            before = float(order.values[:rank].exp().sum())
            assert rank < 3 if i < 8 else before <= 0.3 + 1e-5
        assert dense.reference.gap(PROMPT, completion, None) < EXACT


def test_scores_are_the_reference_at_temperature_one(dense):
    version = dense.version()
    dense.engine.publish(version)
    sequences = [PROMPT, PROMPT[:7], list(range(90, 120))]
    for number, adapter in ((None, None), (version.number, version)):
        for tokens, found in zip(sequences, dense.engine.score(sequences, number), strict=True):
            table = dense.reference.logprobs(tokens, adapter)
            want = table.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
            assert len(found) == len(tokens) - 1
            assert float((want - torch.tensor(found)).abs().max()) < EXACT
    dense.clear()


def test_requests_in_flight_finish_on_their_version(dense):
    old, new = dense.version(), dense.version()
    dense.engine.publish(old)
    running = dense.engine.submit(request(old.number, tokens=150))
    dense.engine.publish(new)
    assert old.number not in dense.engine.retire()  # it still has a request
    late = dense.engine.generate([request(new.number, tokens=8)])[0]
    early = running.result(timeout=120)
    assert early.versions == [old.number] * 150 and late.versions == [new.number] * 8
    assert dense.reference.gap(PROMPT, early, old) < EXACT < DIFFERENT < dense.reference.gap(PROMPT, early, new)
    assert dense.reference.gap(PROMPT, late, new) < EXACT
    assert old.number in dense.engine.retire()
    assert dense.engine.versions() == [new.number]
    assert list(dense.engine.held_checksums()) == [new.number]


def test_requests_to_versions_that_are_not_live_are_refused(dense):
    first, second = dense.version(), dense.version()
    dense.engine.publish(first)
    dense.engine.publish(second)
    dense.engine.retire()
    for number in (first.number, 999):
        with pytest.raises(EngineError, match=f"version {number} is not live; live versions are"):
            dense.engine.generate([request(number)])
        with pytest.raises(EngineError, match="is not live"):
            dense.engine.score([PROMPT], number)
    with pytest.raises(EngineError, match="is live already"):
        dense.engine.publish(second)


def test_no_free_slot_is_an_error_and_drained_versions_make_room(dense):
    versions = [dense.version() for _ in range(5)]
    for version in versions:  # five into four slots: the drained ones go by themselves
        dense.engine.publish(version)
    dense.clear()
    busy = [versions[-1], dense.version(), dense.version(), dense.version()]
    for version in busy[1:]:
        dense.engine.publish(version)
    futures = [dense.engine.submit(request(version.number, tokens=200)) for version in busy]
    with pytest.raises(EngineError, match=r"no free slot: engine\.live_versions=4"):
        dense.engine.publish(dense.version())
    for version, future in zip(busy, futures, strict=True):
        assert dense.reference.gap(PROMPT, future.result(timeout=120), version) < EXACT
    dense.clear()


def test_no_prefix_is_shared_between_versions(dense):
    first, second = dense.version(), dense.version()
    dense.engine.publish(first)
    dense.engine.publish(second)
    prompt = list(range(100, 140))
    cached = {}
    for _ in range(2):
        for number in (None, first.number, second.number):
            completion = dense.engine.generate([request(number, prompt=prompt, tokens=4)])[0]
            cached.setdefault(number, []).append(completion.cached_tokens)
    assert cached == {n: [0, len(prompt) - 1] for n in (None, first.number, second.number)}
    dense.engine.flush_cache()
    assert dense.engine.generate([request(None, prompt=prompt, tokens=4)])[0].cached_tokens == 0
    dense.clear()


def test_samples_of_one_prompt_prefill_it_once_and_differ(dense):
    prompt = list(range(150, 190))
    completions = dense.engine.generate([request(None, seed=s, prompt=prompt, tokens=8) for s in range(8)])
    assert sorted(c.cached_tokens for c in completions) == [0] + [len(prompt) - 1] * 7
    assert len({tuple(c.token_ids) for c in completions}) == 8
    again = dense.engine.generate([request(None, seed=3, prompt=prompt, tokens=8)])[0]
    assert again.token_ids == completions[3].token_ids  # a sample depends on its seed, not on its neighbours


def test_stop_tokens_end_a_sample_and_belong_to_it(dense):
    free = dense.engine.generate([request(None, tokens=12)])[0]
    stop = free.token_ids[4]
    ended = dense.engine.generate([request(None, tokens=12, stop_token_ids=(stop,))])[0]
    first = free.token_ids.index(stop)
    assert ended.token_ids == free.token_ids[: first + 1] and ended.finish_reason is FinishReason.stop
    assert free.finish_reason is FinishReason.length and len(ended.logprobs) == len(ended.versions) == first + 1


def _altered(version: AdapterVersion, **tensors: torch.Tensor | None) -> AdapterVersion:
    changed = dict(version.tensors)
    for name, tensor in tensors.items():
        changed.pop(name) if tensor is None else changed.update({name: tensor})
    return make_version(version.number, version.spec, changed)


def test_malformed_versions_are_refused_by_name_and_the_engine_lives_on(dense):
    version, lora = dense.version("oft"), dense.version("lora")
    name = "model.layers.1.self_attn.q_proj.oft_R"
    good = version.tensors[name]
    bad_value = good.clone()
    bad_value[0, 0, 0] = float("nan")
    cases = [
        (_altered(version, **{"model.layers.9.self_attn.q_proj.oft_R": good}), "model.layers.9.self_attn.q_proj.oft_R"),
        (_altered(version, **{name: good[:1]}), rf"{name} has shape \[1, 16, 16\], expected \[4, 16, 16\]"),
        (_altered(version, **{name: bad_value}), f"{name} has NaN"),
        (_altered(lora, **{"model.layers.0.mlp.up_proj.lora_B": None}), "lora_A without .*lora_B"),
        (make_version(version.number, version.spec, {}), "is empty"),
        (dataclasses.replace(version, checksum="0" * 64), "was announced"),
        (dataclasses.replace(version, spec=dataclasses.replace(version.spec, kind="ia3")), "ia3"),
    ]
    held = dense.engine.held_checksums()
    for broken, message in cases:
        with pytest.raises(EngineError, match=message):
            dense.engine.publish(broken)
        assert broken.number not in dense.engine.versions()
        assert dense.engine.held_checksums() == held
    dense.engine.publish(version)
    assert dense.reference.gap(PROMPT, dense.engine.generate([request(version.number)])[0], version) < EXACT
    dense.clear()


def test_calls_from_many_threads_are_answered_each_to_its_own(dense):
    prompts = [list(range(start, start + 20)) for start in range(10, 16)]
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        completion = dense.engine.generate([request(None, prompt=prompts[i], temperature=0.0, tokens=6)])[0]
        answers[i] = completion.token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for i, prompt in enumerate(prompts):
        table = dense.reference.logprobs(prompt + answers[i], None)[len(prompt) - 1 :]
        assert table.argmax(-1).tolist() == answers[i]


def test_info_names_hooks_adapters_and_requests(dense):
    version = dense.version()
    dense.engine.publish(version)
    info = dense.engine.info()
    assert info["sglang"] == "0.5.17" and info["missing_hooks"] == [] and len(info["hooks"]) > 10
    assert info["adapters"][f"orbit@{version.number:06d}"]["checksum"] == version.checksum
    assert info["requests"][str(version.number)] == 0 and info["requests"]["base"] == 0
    dense.clear()
