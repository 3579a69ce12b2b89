"""Latent-attention mixtures: deepseek_v3, kimi_k2 (its text twin), kimi_k25 (Kimi-K2.5 and K2.6, with a vision tower).

Shapes are those of the published checkpoints (DeepSeek-V3, 2412.19437; moonshotai/Kimi-K2.5: 208,550 tensors, 554.27
GiB, which these lists reproduce to the last byte). The vision tower is MoonViT as Kimi-VL describes it (2504.07491).
"""

from __future__ import annotations

from dataclasses import replace

from orbit_cli.planner.dense import (
    expert_activations,
    linear,
    mlp,
    mlp_activations,
    packed_expert_activations,
    router,
    swiglu_activations,
    vector,
)
from orbit_cli.planner.facts import Facts
from orbit_cli.planner.shape import ActivationShape, CacheShape, Category, Kept, ModelShape, Plain, Weight


def latent_attention(facts: Facts) -> ModelShape:
    """A deepseek_v3-like model; tensor paths carry the checkpoint's own prefix."""
    hidden, layers, heads = (
        facts.whole("hidden_size"),
        facts.whole("num_hidden_layers"),
        facts.whole("num_attention_heads"),
    )
    q_rank, kv_rank = facts.whole("q_lora_rank", 0), facts.whole("kv_lora_rank")
    nope, rope, value = facts.whole("qk_nope_head_dim"), facts.whole("qk_rope_head_dim"), facts.whole("v_head_dim")
    experts, width = facts.whole("n_routed_experts"), facts.whole("moe_intermediate_size")
    shared, top_k = facts.whole("n_shared_experts", 0), facts.whole("num_experts_per_tok")
    vocabulary, tied = facts.whole("vocab_size"), facts.flag("tie_word_embeddings", False)
    first = min(facts.whole("first_k_dense_replace", 0), layers)
    every, plain, sparse = tuple(range(layers)), tuple(range(first)), tuple(range(first, layers))
    middle = facts.whole("intermediate_size", None if plain else 0)
    query, key = heads * (nope + rope), nope + rope
    beside = swiglu_activations("shared expert: ", shared * width, "down_proj")

    shapes = {"kv_a_proj_with_mqa": (kv_rank + rope, hidden), "kv_b_proj": (heads * (nope + value), kv_rank)}
    if q_rank:
        shapes |= {"q_a_proj": (q_rank, hidden), "q_b_proj": (query, q_rank)}
    else:
        shapes["q_proj"] = (query, hidden)
    shapes["o_proj"] = (hidden, heads * value)
    weights = [linear(Category.attention, f"self_attn.{name}", *size, every) for name, size in shapes.items()]
    weights += [
        vector(Category.norms, "model.layers.*.input_layernorm", hidden, every),
        vector(Category.norms, "model.layers.*.post_attention_layernorm", hidden, every),
        vector(Category.norms, "model.layers.*.self_attn.kv_a_layernorm", kv_rank, every),
        vector(Category.norms, "model.norm", hidden, ()),
        Weight(category=Category.embeddings, path="model.embed_tokens", rows=vocabulary, columns=hidden),
    ]
    if q_rank:
        weights.append(vector(Category.norms, "model.layers.*.self_attn.q_a_layernorm", q_rank, every))
    if not tied:
        weights.append(Weight(category=Category.embeddings, path="lm_head", rows=vocabulary, columns=hidden))
    if plain:
        weights += mlp(Category.dense, "mlp", hidden, middle, plain)
    if sparse:
        weights += mlp(Category.experts, "mlp.experts.*", hidden, width, sparse, each=experts)
        weights += _routers(experts, hidden, sparse)
    if sparse and shared:
        weights += mlp(Category.shared, "mlp.shared_experts", hidden, shared * width, sparse)
    if facts.model_type == "kimi_k25":
        weights = [replace(weight, path=f"language_model.{weight.path}") for weight in weights] + vision(facts)
    return ModelShape(
        model_type=facts.model_type,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
        heads=heads,
        weights=tuple(weights),
        cache=CacheShape(
            elements=layers * (kv_rank + rope),
            heads=1,
            formula=f"{layers} layers x ({kv_rank} latent + {rope} rotary)",
        ),
        activations=ActivationShape(
            attention=_attention_activations(hidden, heads, q_rank, kv_rank, key, nope + value, value),
            dense=mlp_activations(hidden, middle),
            experts=expert_activations(hidden, width, top_k, experts) + beside,
            packed_experts=packed_expert_activations(hidden, width, top_k) + beside,
            dense_layers=len(plain),
            expert_layers=len(sparse),
            stream=hidden,
            dense_width=middle,
            expert_width=width,
            probabilities=heads,  # keys and values differ in width: torch's fused attention on a CPU wants them equal
        ),
        tied=tied,
        experts=experts,
        experts_per_token=top_k,
        longest=facts.whole("max_position_embeddings", 0),
        stored_formats=("int4",) if facts.quantization else (),
    )


def vision(facts: Facts) -> list[Weight]:
    """MoonViT and the projector of a kimi_k25 checkpoint; the text policy does not use them."""
    tower = Facts(facts.section("vision_config") or {}, f"{facts.where}: vision_config")
    width, middle = tower.whole("vt_hidden_size", 1152), tower.whole("vt_intermediate_size", 4304)
    blocks, patch = tower.whole("vt_num_hidden_layers", 27), tower.whole("patch_size", 14)
    positions = tower.whole("init_pos_emb_height", 64) * tower.whole("init_pos_emb_width", 64)
    merged = width * 4  # 2 x 2 patches become one token
    linears = {
        "vision_tower.encoder.blocks.*.wqkv": (3 * width, width, blocks),
        "vision_tower.encoder.blocks.*.wo": (width, width, blocks),
        "vision_tower.encoder.blocks.*.mlp.fc0": (middle, width, blocks),
        "vision_tower.encoder.blocks.*.mlp.fc1": (width, middle, blocks),
        "vision_tower.patch_embed.proj": (width, 3 * patch * patch, 1),
        "mm_projector.proj.0": (merged, merged, 1),
        "mm_projector.proj.2": (facts.whole("hidden_size"), merged, 1),
    }
    norms = {
        "vision_tower.encoder.blocks.*.norm0": (width, blocks),
        "vision_tower.encoder.blocks.*.norm1": (width, blocks),
        "vision_tower.encoder.final_layernorm": (width, 1),
        "mm_projector.pre_norm": (width, 1),
    }
    weights = [_tower("vision_tower.patch_embed.pos_emb", positions, width)]
    for path, (rows, columns, count) in linears.items():
        weights += [_tower(path, rows, columns, count), _tower(f"{path}.bias", 1, rows, count)]
    for path, (size, count) in norms.items():
        weights += [_tower(path, 1, size, count), _tower(f"{path}.bias", 1, size, count)]
    return weights


def _attention_activations(
    hidden: int, heads: int, q_rank: int, kv_rank: int, key: int, decompressed: int, value: int
) -> tuple[Kept, ...]:
    """`decompressed` numbers of each head leave kv_b_proj: a key without its rotary part, and a value."""
    return (
        Kept("input of the norm, float32", hidden, 4),
        Kept("its output: input of q_a and kv_a", hidden, only_for=("q_a_proj", "kv_a_proj_with_mqa", "q_proj")),
        Kept("inputs of the latent norms, float32", q_rank + kv_rank, 4),
        Kept("output of the query's: input of q_b", q_rank, only_for=("q_b_proj",)),
        Kept("output of the other: input of kv_b", kv_rank, only_for=("kv_b_proj",)),
        Kept("queries and keys with rotary part", 2 * heads * key),
        Kept("output of kv_b, of which the values are a view", heads * decompressed),
        Kept("attention's output", heads * value),
        Kept("its log-sum, float32", heads, 4),
    )


def _routers(experts: int, hidden: int, layers: tuple[int, ...]) -> list[Weight]:
    bias = vector(Category.router, "model.layers.*.mlp.gate.e_score_correction_bias", experts, layers)
    return [router(experts, hidden, layers), replace(bias, plain=Plain.f32)]


def _tower(path: str, rows: int, columns: int, count: int = 1) -> Weight:
    return Weight(category=Category.vision, path=path, rows=rows, columns=columns, count=count)
