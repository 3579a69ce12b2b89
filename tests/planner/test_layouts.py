"""Bytes on one GPU: base under every layout, KV cache per token, adapters of every size and set."""

from __future__ import annotations

import pytest
from planning import ATTENTION, FRONTIER, MLP, adapter, bases, millions, model_of, planned

from orbit_cli.planner.adapters import sites
from orbit_cli.planner.part import Side
from orbit_cli.planner.plan import make_plan
from orbit_cli.planner.shape import Category, Plain

EIGHT = "hardware=b200x8"


def test_base_on_each_of_eight_gpus() -> None:
    """Experts split and the rest whole: 95.7, 27.2, 131.5 GB; all split: 74.4, 19.5, 106.3 GB."""
    split, sharded, tensor = [], [], []
    for name in FRONTIER:
        train = planned(f"model={name}", EIGHT, "memory.trainer_layout=expert_parallel").phases[0]
        split.append(f"{bases(train, Side.trainer):.1f}")
        tensor.append(f"{bases(train, Side.engine):.1f}")
        train = planned(f"model={name}", EIGHT, "memory.trainer_layout=sharded").phases[0]
        sharded.append(f"{bases(train, Side.trainer):.1f}")
    assert split == ["95.7", "27.2", "131.5"]
    assert sharded == tensor == ["74.4", "19.5", "106.3"]


def test_experts_split_and_all_the_rest_whole_in_bf16() -> None:
    found = []
    for name in FRONTIER:
        model = model_of(name)
        experts = next(held.nbytes(2) for held in model.held if held.category is Category.experts)
        others = [w for w in model.shape.weights if w.category not in (Category.experts, Category.mtp)]
        plain = sum(w.parameters * (8 if w.plain is Plain.i64 else 2) for w in others)
        found.append(f"{(experts / 8 + plain) / 1e9:.1f}")
    assert found == ["95.7", "33.0", "154.0"]


def test_a_replicated_base_is_whole_on_every_gpu() -> None:
    plan = planned("model=deepseek_v4_flash", EIGHT, "memory.trainer_layout=replicated")
    assert f"{bases(plan.phases[0], Side.trainer):.2f}" == "156.02"


def test_cache_bytes_per_token() -> None:
    cells = {name: model_of(name).shape.cache for name in (*FRONTIER, "qwen3_30b_a3b", "qwen3_4b")}
    assert 2 * cells["kimi_k26"].elements == 70_272 and cells["kimi_k26"].elements == 35_136
    assert 2 * cells["qwen3_30b_a3b"].elements == 98_304
    assert 2 * cells["qwen3_4b"].elements == 147_456
    flash, pro = cells["deepseek_v4_flash"], cells["deepseek_v4_pro"]
    assert (f"{flash.packed_bytes:.0f}", f"{pro.packed_bytes:.0f}") == ("3850", "5511")
    assert (int(flash.packed_bytes + flash.window_bytes), round(pro.packed_bytes + pro.window_bytes)) == (7705, 10_994)
    assert (2 * flash.elements, 2 * pro.elements) == (6_880, 9_848)  # stored in BF16
    assert (f"{flash.sequence_bytes / 1e6:.1f}", f"{pro.sequence_bytes / 1e6:.1f}") == ("10.5", "16.3")


def test_the_published_launchers_cache_takes_90_gb_on_each_gpu() -> None:
    plan = planned("model=kimi_k26", EIGHT, "engine.max_total_tokens=1280000")
    part = next(part for part in plan.phases[0].parts if part.name == "KV cache")
    assert f"{part.nbytes / 1e9:.0f}" == "90"


def test_the_latent_cache_is_whole_on_every_rank_and_heads_are_split() -> None:
    assert planned("model=kimi_k26", EIGHT).cache_bytes_per_token == 70_272
    assert planned("model=qwen3_30b_a3b", EIGHT, "engine.tensor_parallel=8").cache_bytes_per_token == 98_304 / 4
    assert planned("model=qwen3_4b", EIGHT, "engine.tensor_parallel=8").cache_bytes_per_token == 147_456 / 8


# Millions of parameters: OFT 16, 32, 64, 128 with own rotations for gate and up, LoRA rank 16, 32.
COUNTS = {
    ("attention", "kimi_k26"): ("11.2", "23.2", "47.2", "95.2", "61.0", "122.1"),
    ("attention", "deepseek_v4_flash"): ("16.2", "33.4", "68.0", "137.0", "66.6", "133.2"),
    ("attention", "deepseek_v4_pro"): ("44.7", "92.5", "187.9", "378.8", "184.4", "368.8"),
    ("attention", "qwen3_30b_a3b"): ("3.7", "7.6", "15.5", "31.2", "13.4", "26.7"),
    ("attention", "qwen3_4b"): ("3.2", "6.6", "13.4", "26.9", "11.8", "23.6"),
    ("linears", "kimi_k26"): ("18.9", "39.0", "79.2", "159.7", "88.8", "177.6"),
    ("linears", "deepseek_v4_flash"): ("19.5", "40.3", "81.8", "165.0", "79.3", "158.5"),
    ("linears", "deepseek_v4_pro"): ("52.7", "108.9", "221.4", "446.2", "214.4", "428.8"),
    ("linears", "qwen3_4b"): ("7.2", "14.9", "30.2", "60.9", "33.0", "66.1"),
    ("all", "kimi_k26"): ("2850", "5890", "11970", "24130", "10281", "20562"),
    ("all", "deepseek_v4_flash"): ("865", "1787", "3633", "7323", "3326", "6651"),
    ("all", "deepseek_v4_pro"): ("3111", "6429", "13066", "26339", "11728", "23455"),
    ("all", "qwen3_30b_a3b"): ("228", "471", "957", "1929", "844", "1688"),
}
# OFT 16, 32, 64, 128 where up takes gate's rotation.
FUSED = {
    ("linears", "kimi_k26"): ("15.6", "32.2", "65.4", "131.9"),
    ("linears", "deepseek_v4_flash"): ("18.2", "37.5", "76.3", "153.8"),
    ("linears", "deepseek_v4_pro"): ("49.4", "102.1", "207.6", "418.5"),
    ("linears", "qwen3_4b"): ("6.5", "13.4", "27.3", "55.0"),
    ("all", "kimi_k26"): ("1608", "3323", "6754", "13615"),
    ("all", "deepseek_v4_flash"): ("525", "1086", "2207", "4448"),
    ("all", "deepseek_v4_pro"): ("1848", "3820", "7763", "15650"),
    ("all", "qwen3_30b_a3b"): ("133", "276", "560", "1130"),
}
SIZES = [("oft", 16), ("oft", 32), ("oft", 64), ("oft", 128), ("lora", 16), ("lora", 32)]


@pytest.mark.parametrize(("which", "name"), COUNTS)
def test_adapter_parameters(which: str, name: str) -> None:
    targets = ATTENTION if which == "attention" else ATTENTION + MLP
    configs = [adapter(kind, size, targets, which == "all") for kind, size in SIZES]
    digits = 0 if which == "all" else 1
    shape = model_of(name).shape
    assert tuple(f"{millions(shape, config):.{digits}f}" for config in configs) == COUNTS[which, name]
    if (which, name) in FUSED:
        fused = tuple(f"{millions(shape, config, fused=True):.{digits}f}" for config in configs[:4])
        assert fused == FUSED[which, name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kimi_k26", "2286"), ("deepseek_v4_flash", "1091"), ("deepseek_v4_pro", "3475"), ("qwen3_30b_a3b", "231")],
)
def test_routed_lora_with_shared_outer_matrices(name: str, expected: str) -> None:
    """Rank 16, A shared by a layer's experts for gate and up, B for down: the form that engines serve."""
    config = adapter("lora", 16, ATTENTION + MLP, True)
    shape, numbers = model_of(name).shape, 0
    for site in sites(shape, config):
        if not site.experts:
            continue
        layers = site.linears // shape.experts
        shared, own = (site.outputs, site.inputs) if site.name in ("down_proj", "w2") else (site.inputs, site.outputs)
        numbers += 16 * layers * (shared + shape.experts * own)
    assert f"{numbers / 1e6:.0f}" == expected


def test_the_published_recipes_adapters() -> None:
    """Kimi-K2.6 block 32: 5.876 B; V4 Flash block 32: 1.787 B; V4 Pro block 16: 3.111 B (own rotations)."""
    every = "adapter.expert_targets=[gate_proj,up_proj,down_proj]"
    found = [
        planned("model=kimi_k26", EIGHT, every).adapter_parameters,
        planned("model=deepseek_v4_flash", EIGHT, every).adapter_parameters,
        planned("model=deepseek_v4_pro", EIGHT, every, "adapter.block_size=16").adapter_parameters,
    ]
    assert [f"{number / 1e9:.3f}" for number in found] == ["5.876", "1.787", "3.111"]


def test_adapters_on_experts_follow_the_layout() -> None:
    """Split by expert they shard; with tensor parallelism the input rotations of gate and up are whole on each rank."""
    every = "adapter.expert_targets=[gate_proj,up_proj,down_proj]"
    overrides = ["model=kimi_k26", EIGHT, every]
    plan = planned(*overrides)
    master = next(p for p in plan.phases[0].parts if p.name == "master weights (float32)")
    rest = planned("model=kimi_k26", EIGHT).phases[0]
    others = next(p for p in rest.parts if p.name == "master weights (float32)")
    assert f"{(master.nbytes - others.nbytes) / 2 / 1e9:.2f}" == "1.46"  # 5.85 B over 8 GPUs, in BF16
    tensor = next(p for p in plan.phases[0].parts if p.name == "adapter slots").nbytes
    shared = planned(*overrides, "memory.shared_base=true")
    expert = next(p for p in shared.phases[0].parts if p.name == "adapter slots").nbytes
    assert 6 < tensor / expert < 8


def test_moments_master_and_gradients() -> None:
    plan = planned("model=qwen3_4b", "hardware=h200x1", "adapter=lora")
    parts = {part.name: part.nbytes for part in plan.phases[0].parts}
    n = plan.adapter_parameters
    assert parts["optimizer moments"] == 8 * n
    assert parts["master weights (float32)"] == 4 * n
    assert parts["gradients"] == 8 * n  # of the master and of what is multiplied


def test_recompute_chunks_and_micro_batches_make_it_smaller() -> None:
    def part(name: str, *overrides: str) -> int:
        plan = planned("model=qwen3_4b", "hardware=h200x1", "experiment=long_answers", *overrides)
        return next(p.nbytes for p in plan.phases[0].parts if p.name == name)

    def peak(*overrides: str) -> int:
        return planned("model=qwen3_4b", "hardware=h200x1", "experiment=long_answers", *overrides).phases[0].nbytes

    assert part("activations") < part("activations", "trainer.activation_checkpointing=false") / 10
    few, many = (peak(f"trainer.logprob_chunk_tokens={tokens}") for tokens in (128, 32_768))
    assert few < many
    assert part("activations", "trainer.micro_batch_tokens=1024") < part(
        "activations", "trainer.micro_batch_tokens=65536"
    )


def test_apart_shared_and_swapped() -> None:
    two = planned("model=kimi_k26", EIGHT)
    one = planned("model=kimi_k26", EIGHT, "memory.shared_base=true")
    swap = planned("model=kimi_k26", EIGHT, "memory.offload=swap")
    apart = planned("model=kimi_k26", EIGHT, "memory.colocated=false", "engine.tensor_parallel=4")
    assert bases(one.phases[0], Side.engine) == 0 < bases(one.phases[0], Side.trainer)
    assert bases(swap.phases[0], Side.engine) == 0 == bases(swap.phases[1], Side.trainer)
    assert (apart.layout.trainer_gpus, apart.layout.engine_gpus) == (4, 4)
    assert {part.side for part in apart.phases[0].parts} == {Side.trainer}
    assert {part.side for part in apart.phases[1].parts} == {Side.engine}
    assert two.peak.nbytes > one.peak.nbytes and two.peak.nbytes > swap.peak.nbytes


def test_routing_replay_is_counted_on_request() -> None:
    plan = planned("model=kimi_k26", EIGHT, "memory.routing_replay=true")
    part = next(p for p in plan.phases[0].parts if p.name == "routing replay")
    assert part.nbytes == plan.lengths.samples * plan.lengths.longest * 60 * 8 * 2


def test_every_number_has_a_formula() -> None:
    for name in (*FRONTIER, "qwen3_30b_a3b", "qwen3_4b"):
        for phase in planned(f"model={name}", EIGHT).phases:
            assert [part.name for part in phase.parts if not part.formula or part.nbytes <= 0] == []
            assert len({part.key for part in phase.parts}) == len(phase.parts)


def test_sampling_alone_needs_no_trainer() -> None:
    (phase,) = make_plan(planned("model=qwen3_4b", "hardware=h200x1").config, trains=False).phases
    assert {part.side for part in phase.parts} == {Side.engine}
