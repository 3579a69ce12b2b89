"""What a GPU holds while it trains: planned, against the tensors of real steps on an imagined GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from imagined_gpu import step

from orbit_cli.config.compose import compose
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.planner.adapters import sites
from orbit_cli.planner.gpu_training import BACKWARD, FORWARD, ROTATIONS, UPDATE, Moments
from orbit_cli.planner.plan import dtype_bytes, make_plan

TOKENS, RESPONSE = 256, 96
SIZES = {
    "tiny_dense": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, intermediate_size=768),
    "tiny_moe": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=2, moe_intermediate_size=192)
    | dict(num_experts=16, num_experts_per_tok=4),
    "tiny_mla_moe": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=8, intermediate_size=512)
    | dict(moe_intermediate_size=128, n_routed_experts=16, num_experts_per_tok=4, q_lora_rank=192, kv_lora_rank=128)
    | dict(qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64),
}
EVERY = "adapter.expert_targets=[gate_proj,up_proj,down_proj]"
SHARED = ("adapter.expert_targets=[gate_proj,up_proj]", "adapter.expert_width=shared")
CASES = [
    ("tiny_dense", "adapter=oft"),
    ("tiny_dense", "adapter=lora"),
    ("tiny_dense", "adapter=oft", "adapter.targets=[q_proj,k_proj,v_proj,o_proj]"),
    ("tiny_moe", "adapter=oft", "adapter.targets=[q_proj,k_proj,v_proj,o_proj]"),
    ("tiny_moe", "adapter=oft", "adapter.targets=[q_proj,k_proj,v_proj,o_proj]", EVERY),
    ("tiny_moe", "adapter=oft", "adapter.targets=[q_proj,k_proj,v_proj,o_proj]", *SHARED),
    ("tiny_moe", "adapter=lora", "adapter.targets=[q_proj,k_proj,v_proj,o_proj]", EVERY),
    ("tiny_mla_moe", "adapter=oft", "adapter.targets=[q_b_proj,kv_b_proj,o_proj,gate_proj,up_proj,down_proj]"),
    ("tiny_mla_moe", "adapter=oft", "adapter.targets=[q_b_proj,kv_b_proj,o_proj]", EVERY),
    ("tiny_mla_moe", "adapter=oft", "adapter.targets=[q_b_proj,kv_b_proj,o_proj]", *SHARED),
    ("tiny_mla_moe", "adapter=lora", "adapter.targets=[q_b_proj,kv_a_proj_with_mqa,o_proj]", EVERY),
]


def config_of(case: tuple[str, ...], folder: Path, *more: str) -> OrbitConfig:
    name, *overrides = case
    sizes = [f"model.architecture.{key}={value}" for key, value in SIZES[name].items()]
    lengths = [f"rollout.max_new_tokens={RESPONSE}", f"rollout.max_prompt_tokens={TOKENS - 2 * RESPONSE}"]
    lengths += ["rollout.prompts_per_step=1", "rollout.group_size=2", "trainer.logprob_chunk_tokens=16"]
    return compose(
        [f"model={name}", "hardware=h200x1", f"quantization.cache_dir={folder}", *sizes, *overrides, *lengths, *more]
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


def moments(config: OrbitConfig) -> Moments:
    plan = make_plan(config)
    return Moments(
        config=config,
        model=plan.model,
        layout=plan.layout,
        lengths=plan.lengths,
        sites=sites(plan.model.shape, config.adapter),
        dtype_bytes=dtype_bytes(config),
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_step_takes_what_is_planned(case: tuple[str, ...], recompute: bool, bases: Path) -> None:
    """Every moment within 10%, the largest within 5%; what is left out is the shared rotary table and token ids."""
    config = config_of(case, bases, f"trainer.activation_checkpointing={recompute}")
    plan = make_plan(config)
    assert (plan.lengths.micro_tokens, plan.lengths.row, plan.lengths.scored) == (TOKENS, TOKENS, 2 * RESPONSE)
    planned = moments(config).all()
    measured = step(config, TOKENS, 2 * RESPONSE)
    kept = sum(part.nbytes for part in planned[FORWARD] if part.name != "logits of one chunk")
    assert kept == pytest.approx(measured.kept, rel=0.1)
    found = {FORWARD: measured.logits, BACKWARD: measured.backward, ROTATIONS: measured.series}
    found[UPDATE] = measured.update - measured.moments
    sums = {name: sum(part.nbytes for part in parts) for name, parts in planned.items()}
    for name, nbytes in found.items():
        assert sums[name] == pytest.approx(nbytes, rel=0.1), name
    assert max(sums.values()) == pytest.approx(measured.peak, rel=0.05)
    if config.adapter.kind == "oft":
        assert moments(config).building() == pytest.approx(measured.materialised, rel=0.01)


def decoded(*overrides: str) -> int:
    config = compose(["model=qwen3_30b_a3b", "hardware=h200x1", *overrides])
    return sum(part.nbytes for part in moments(config).all()[BACKWARD] if part.name == "decoded weight")


def test_only_some_paths_decode_experts() -> None:
    """Kernels nothing; chunks their budget, or a layer that it holds twice; the reference one expert's gate and up."""
    assert decoded() == decoded("trainer.expert_path=kernels") == 0
    whole_layer = 128 * 2 * 768 * 2048 * 2  # of gate and up, 805 MB
    assert decoded("trainer.expert_path=chunked", "trainer.expert_chunk_bytes=100000000") == 100_000_000
    assert decoded("trainer.expert_path=chunked", "trainer.expert_chunk_bytes=2000000000") == whole_layer
    assert decoded("trainer.expert_path=chunked") == decoded("trainer.expert_path=fastest") == 1 << 30
    assert decoded("trainer.expert_path=reference") == 2 * 768 * 2048 * 7
    assert decoded("model.dtype=float32") == 4096 * 2048 * 7  # the kernels take BF16 only: q_proj is decoded too


def test_sizes_that_kernels_do_not_take_are_decoded() -> None:
    odd = "model.architecture.moe_intermediate_size=784"  # no multiple of 32, so down_proj stays unquantised as well
    assert decoded(odd) == 2 * 784 * 2048 * 7
    assert decoded(odd, "quantization=bf16") == 0
