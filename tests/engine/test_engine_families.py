"""MoE and MLA families: every adapted linear of an engine against transformers, for both kinds, in one batch."""

from __future__ import annotations

import dataclasses

import pytest

from orbit_cli.adapters.bundle import make_version
from orbit_cli.errors import ConfigError
from orbit_cli.types import SampleRequest, SamplingParams

EXACT = 1e-4
DIFFERENT = 2e-2
PROMPT = list(range(7, 40))


def _ask(engine, numbers: list[int | None], tokens: int = 10):
    params = SamplingParams(max_new_tokens=tokens)
    requests = [SampleRequest(token_ids=PROMPT, params=params, version=n, seed=i) for i, n in enumerate(numbers)]
    return engine.generate(requests)


def _check_batch(bench, versions) -> None:
    for version in versions:
        if version is not None:
            bench.engine.publish(version)
    completions = _ask(bench.engine, [None if v is None else v.number for v in versions])
    for own, completion in zip(versions, completions, strict=True):
        assert bench.reference.gap(PROMPT, completion, own) < EXACT
        others = [bench.reference.gap(PROMPT, completion, other) for other in versions if other is not own]
        assert min(others) > DIFFERENT
    bench.clear()


def _check_each_target(bench, kind: str, leaves) -> None:
    """A version on one kind of linear alone moves the log-probs and matches: no other linear's adapter can hide it."""
    for leaf in leaves:
        whole = bench.version(kind)
        alone = {name: t for name, t in whole.tensors.items() if leaf in name}
        assert alone, leaf
        version = make_version(whole.number, whole.spec, alone)
        bench.engine.publish(version)
        completion = _ask(bench.engine, [version.number], tokens=6)[0]
        assert bench.reference.gap(PROMPT, completion, version) < EXACT, leaf
        assert bench.reference.gap(PROMPT, completion, None) > EXACT * 10, leaf
        bench.clear()


def test_int4_moe_with_adapters_on_attention_and_experts(moe):
    _check_batch(moe, [None, moe.version("oft"), moe.version("oft"), moe.version("lora")])


@pytest.mark.parametrize("kind", ["oft", "lora"])
def test_int4_moe_each_target_alone(moe, kind):
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj", "experts", "gate_proj", "up_proj", "down_proj")
    _check_each_target(moe, kind, leaves)


def test_one_expert_alone_acts_on_its_tokens(moe):
    whole = moe.version("oft")
    alone = {name: t for name, t in whole.tensors.items() if ".experts.1." in name}
    version = make_version(whole.number, whole.spec, alone)
    moe.engine.publish(version)
    scores = moe.engine.score([PROMPT], version.number)[0]
    base = moe.engine.score([PROMPT], None)[0]
    table = moe.reference.logprobs(PROMPT, version)
    want = [float(row[token]) for row, token in zip(table, PROMPT[1:], strict=True)]
    assert max(abs(a - b) for a, b in zip(scores, want, strict=True)) < EXACT
    assert max(abs(a - b) for a, b in zip(scores, base, strict=True)) > DIFFERENT / 2
    moe.clear()


def test_latent_attention_with_every_linear_adapted(mla):
    without = ("kv_b_proj",)  # of LoRA: absorbed attention cannot add it
    lora = mla.version("lora")
    kept = {name: t for name, t in lora.tensors.items() if not any(leaf in name for leaf in without)}
    _check_batch(mla, [None, mla.version("oft"), mla.version("oft"), make_version(lora.number, lora.spec, kept)])


def test_latent_attention_each_oft_target_alone(mla):
    leaves = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "shared_experts", ".experts.",
              "layers.0.mlp")  # fmt: skip
    _check_each_target(mla, "oft", leaves)


def test_latent_attention_each_lora_target_alone(mla):
    _check_each_target(mla, "lora", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "shared_experts"))


def test_lora_on_kv_b_proj_is_refused_before_anything_starts(mla, tmp_path):
    from engine_setup import make_engine

    spec = dataclasses.replace(mla.spec, kind="lora")
    with pytest.raises(ConfigError, match="kv_b_proj.*cannot serve as lora on model type deepseek_v3"):
        make_engine(mla.folder, spec, tmp_path / "log")
