"""Families with grouped-query attention: llama, qwen2, qwen3 (dense) and qwen3_moe.

Tensor names and shapes are those of transformers' modules and of the published checkpoints (Qwen/Qwen3-30B-A3B,
Qwen/Qwen3-4B, HuggingFaceTB/SmolLM2).
"""

from __future__ import annotations

from orbit_cli.planner.facts import Facts
from orbit_cli.planner.shape import ActivationShape, CacheShape, Category, Kept, ModelShape, Weight


def grouped_query(facts: Facts) -> ModelShape:
    """A llama-like model, with routed experts where the config has them."""
    hidden, layers, heads = facts.whole("hidden_size"), facts.whole("num_hidden_layers"), _heads(facts)
    kv = facts.whole("num_key_value_heads", heads)
    head = facts.whole("head_dim", hidden // heads)
    vocabulary, tied = facts.whole("vocab_size"), facts.flag("tie_word_embeddings", False)
    every = tuple(range(layers))
    moe = facts.model_type == "qwen3_moe"
    normed = facts.model_type in ("qwen3", "qwen3_moe")  # RMS norms on each head's query and key
    sparse = tuple(n for n in every if moe and _is_sparse(facts, n))
    plain = tuple(n for n in every if n not in sparse)
    experts, width = _experts(facts) if moe else 0, facts.whole("moe_intermediate_size") if moe else 0
    middle = facts.whole("intermediate_size", 0 if moe and not plain else None)

    weights = [
        linear(Category.attention, "self_attn.q_proj", heads * head, hidden, every),
        linear(Category.attention, "self_attn.k_proj", kv * head, hidden, every),
        linear(Category.attention, "self_attn.v_proj", kv * head, hidden, every),
        linear(Category.attention, "self_attn.o_proj", hidden, heads * head, every),
        vector(Category.norms, "model.layers.*.input_layernorm", hidden, every),
        vector(Category.norms, "model.layers.*.post_attention_layernorm", hidden, every),
        vector(Category.norms, "model.norm", hidden, ()),
        Weight(category=Category.embeddings, path="model.embed_tokens", rows=vocabulary, columns=hidden),
    ]
    if normed:
        weights += [vector(Category.norms, f"model.layers.*.self_attn.{n}_norm", head, every) for n in "qk"]
    if facts.flag("attention_bias", facts.model_type == "qwen2"):
        sizes = {"q": heads * head, "k": kv * head, "v": kv * head}
        sizes |= {} if facts.model_type == "qwen2" else {"o": hidden}
        for name, size in sizes.items():
            weights.append(vector(Category.attention, f"model.layers.*.self_attn.{name}_proj.bias", size, every))
    if not tied:
        weights.append(Weight(category=Category.embeddings, path="lm_head", rows=vocabulary, columns=hidden))
    if plain:
        weights += mlp(Category.dense, "mlp", hidden, middle, plain)
    if sparse:
        weights += mlp(Category.experts, "mlp.experts.*", hidden, width, sparse, each=experts)
        weights.append(router(experts, hidden, sparse))
    top_k = facts.whole("num_experts_per_tok") if moe else 0
    return ModelShape(
        model_type=facts.model_type,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
        heads=heads,
        weights=tuple(weights),
        cache=CacheShape(
            elements=2 * layers * kv * head,
            heads=kv,
            formula=f"2 (K, V) x {layers} layers x {kv} heads x {head}",
        ),
        activations=ActivationShape(
            attention=attention_activations(hidden, heads * head, kv * head, heads, normed),
            dense=mlp_activations(hidden, middle),
            experts=expert_activations(hidden, width, top_k, experts),
            packed_experts=packed_expert_activations(hidden, width, top_k),
            dense_layers=len(plain),
            expert_layers=len(sparse),
            stream=hidden,
            dense_width=middle,
            expert_width=width,
        ),
        tied=tied,
        experts=experts,
        experts_per_token=top_k,
        longest=facts.whole("max_position_embeddings", 0),
    )


def mlp(category: Category, path: str, hidden: int, width: int, layers: tuple[int, ...], each: int = 1) -> list[Weight]:
    """gate, up and down of a SwiGLU, `each` times per layer."""
    sizes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return [linear(category, f"{path}.{name}", *size, layers, each) for name, size in sizes.items()]


def attention_activations(hidden: int, queries: int, keys: int, heads: int, normed: bool) -> tuple[Kept, ...]:
    """What attention keeps of a token: float32 where transformers' RMSNorm computes in it."""
    kept = [
        Kept("input of the norm, float32", hidden, 4),
        Kept("its output: input of q, k, v", hidden, only_for=("q_proj", "k_proj", "v_proj")),
        Kept("q, k, v after rotary positions, k and v repeated for each query head", 3 * queries),
        Kept("attention's output", queries),
        Kept("its log-sum, float32", heads, 4),
    ]
    if normed:
        kept.append(Kept("inputs of the query and key norms, float32", queries + keys, 4))
    return tuple(kept)


def mlp_activations(hidden: int, width: int) -> tuple[Kept, ...]:
    """What a SwiGLU keeps of a token."""
    return (
        Kept("input of the norm, float32", hidden, 4),
        Kept("its output: input of gate and up", hidden, only_for=("gate_proj", "up_proj")),
        *swiglu_activations("", width, "down_proj"),
    )


def swiglu_activations(owner: str, width: int, down: str) -> tuple[Kept, ...]:
    """Between the linears of a SwiGLU; `down` is the adapter target that takes the product."""
    return (
        Kept(f"{owner}gate, silu(gate) and up", 3 * width),
        Kept(f"{owner}their product: input of {down}", width, only_for=(down,)),
    )


def expert_activations(hidden: int, width: int, top_k: int, experts: int) -> tuple[Kept, ...]:
    """What routed experts keep of a token in PyTorch: every expert that it visits keeps its own rows."""
    return (
        Kept("input of the norm, float32", hidden, 4),
        Kept("its output", hidden),
        Kept("router: logits and probabilities, float32", 2 * experts, 4),
        Kept("rows by expert: input of gate and up", top_k * hidden),
        Kept("gate, silu(gate), up and their product", 4 * top_k * width),
    )


def packed_expert_activations(hidden: int, width: int, top_k: int) -> tuple[Kept, ...]:
    """What the GPU kernels keep of a token: its one input and gate and up by expert; the router keeps nothing."""
    return (
        Kept("input of the norm, float32", hidden, 4),
        Kept("its output: input of the experts", hidden),
        Kept("gate and up by expert", 2 * top_k * width),
        Kept("routing: order and position, int32", 2 * top_k, 4),
        Kept("routing weights", top_k),
    )


def _heads(facts: Facts) -> int:
    return facts.whole("num_attention_heads")


def _experts(facts: Facts) -> int:
    key = "num_experts" if "num_experts" in facts.text else "num_local_experts"  # as transformers 5 writes it
    return facts.whole(key)


def _is_sparse(facts: Facts, layer: int) -> bool:
    step = facts.whole("decoder_sparse_step", 1)
    dense = facts.wholes("mlp_only_layers") if facts.text.get("mlp_only_layers") else []
    return layer not in dense and (layer + 1) % max(step, 1) == 0


def router(experts: int, hidden: int, layers: tuple[int, ...]) -> Weight:
    """One routing matrix in each of `layers`; no linear that an adapter could name."""
    return Weight(
        category=Category.router,
        path="model.layers.*.mlp.gate",
        rows=experts,
        columns=hidden,
        count=len(layers),
        layers=layers,
    )


def linear(category: Category, path: str, rows: int, columns: int, layers: tuple[int, ...], each: int = 1) -> Weight:
    """`each` matrices [rows, columns] in each of `layers`, at `path` below the layer."""
    return Weight(
        category=category,
        path=f"model.layers.*.{path}",
        rows=rows,
        columns=columns,
        count=each * len(layers),
        layers=layers,
        linear=True,
    )


def vector(category: Category, path: str, size: int, layers: tuple[int, ...]) -> Weight:
    """One vector in each of `layers`, or one in all if there are none, at the whole `path`."""
    return Weight(category=category, path=path, rows=1, columns=size, count=max(len(layers), 1), layers=layers)
