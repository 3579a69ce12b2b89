"""DeepSeek V4 (Flash and Pro): compressed sparse attention, hyper-connections, FP4 experts, one block to predict ahead.

Shapes are those of the published checkpoints (deepseek-ai/DeepSeek-V4-Flash: 69,187 tensors, 148.65 GiB;
DeepSeek-V4-Pro: 145,116 tensors, 805.32 GiB; both reproduced to the last byte) and of DeepSeek's inference/model.py.
Cache sizes are SGLang 0.5.17's (srt/model_executor/pool_configurator.py, class of the DSV4 pools).
"""

from __future__ import annotations

from orbit_cli.errors import ConfigError
from orbit_cli.planner.dense import expert_activations, packed_expert_activations, swiglu_activations
from orbit_cli.planner.facts import Facts
from orbit_cli.planner.shape import ActivationShape, CacheShape, Category, Kept, ModelShape, Plain, Weight

STREAMS_EXTRA = 2  # a mixer has a row for each stream's input and output beside the n x n combination
SWA_SHARE = 0.1  # SGLang's swa_full_tokens_ratio: sliding-window slots per pool token
CSA, HCA = 4, 128  # tokens that one compressed entry stands for


def deepseek_v4(facts: Facts) -> ModelShape:
    """DeepSeek V4 with its multi-token-prediction block, whose tensors neither trainer nor engine loads."""
    hidden, layers, heads = (
        facts.whole("hidden_size"),
        facts.whole("num_hidden_layers"),
        facts.whole("num_attention_heads"),
    )
    ahead = facts.whole("num_nextn_predict_layers", 0)
    ratios = facts.wholes("compress_ratios")
    if len(ratios) < layers:
        raise ConfigError(
            f"{facts.where}: compress_ratios has {len(ratios)} entries for {layers} layers; list every one"
        )
    experts, width = facts.whole("n_routed_experts"), facts.whole("moe_intermediate_size")
    top_k, shared = facts.whole("num_experts_per_tok"), facts.whole("n_shared_experts", 1)
    vocabulary, head = facts.whole("vocab_size"), facts.whole("head_dim")
    hashed = facts.whole("num_hash_layers", 0)
    block = _Block(facts)

    weights: list[Weight] = []
    kinds = {ratio: tuple(n for n in range(layers) if ratios[n] == ratio) for ratio in (0, CSA, HCA)}
    for ratio, where in kinds.items():
        weights += block.compressor(ratio, where)
    every = tuple(range(layers))
    weights += block.common(every)
    weights += block.routing(tuple(n for n in every if n < hashed), tuple(n for n in every if n >= hashed))
    weights += [
        Weight(category=Category.embeddings, path="embed", rows=vocabulary, columns=hidden),
        Weight(category=Category.embeddings, path="head", rows=vocabulary, columns=hidden),
        Weight(category=Category.norms, path="norm", rows=1, columns=hidden),
        *block.head_mixer(Category.hyper, ""),
    ]
    for number in range(ahead):
        weights += block.ahead(number)
    csa, hca = len(kinds[CSA]), len(kinds[HCA])
    mixed = Kept("streams before and after their mixing, float32", 2 * block.streams * hidden, 4)
    beside = swiglu_activations("shared expert: ", shared * width, "w2")
    return ModelShape(
        model_type=facts.model_type,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
        heads=heads,
        weights=tuple(weights),
        cache=cache(facts, layers, csa, hca),
        activations=ActivationShape(
            attention=(
                mixed,
                Kept("input of the norm, float32", hidden, 4),
                Kept("its output: input of wq_a and wkv", hidden, only_for=("wq_a", "wkv")),
                Kept("inputs of the latent norms, float32", block.q_rank + head, 4),
                Kept("queries, before and after rotary positions", 2 * heads * head),
                Kept("attention's output, and its inverse rotation", 2 * heads * head),
                Kept("input of wo_b", block.o_groups * block.o_rank),
            ),
            experts=(mixed, *expert_activations(hidden, width, top_k, experts), *beside),
            packed_experts=(mixed, *packed_expert_activations(hidden, width, top_k), *beside),
            expert_layers=layers,
            stream=block.streams * hidden,
            expert_width=width,
            probabilities=heads * 5 // 4,  # transformers has only plain attention for it; a quarter is compressed keys
            fused_on_gpu=False,
        ),
        experts=experts,
        experts_per_token=top_k,
        longest=facts.whole("max_position_embeddings", 0),
        stored_formats=("mxfp4", "fp8"),
    )


def cache(facts: Facts, layers: int, csa: int, hca: int) -> CacheShape:
    """Compressed entries of 584 B (448 FP8 + 64 BF16 + 7 scales + 1 pad) and indexer keys of 132 B; see the module."""
    rope, head = facts.whole("qk_rope_head_dim"), facts.whole("head_dim")
    index = facts.whole("index_head_dim")
    entry = (head - rope) + 2 * rope + 8
    key = index + 4 * (index // 128)
    state = 4 * 2 * 2 * (head + index)  # float32, key and gate, two overlapping windows
    per_token = csa * (entry + key) / CSA + hca * entry / HCA
    window = SWA_SHARE * (layers * entry + csa * state * 2 * CSA / facts.whole("sliding_window"))
    return CacheShape(
        elements=csa * (head + index) // CSA + hca * head // HCA,
        heads=1,
        formula=f"{csa} layers x ({entry} + {key}) B / {CSA} + {hca} layers x {entry} B / {HCA}",
        packed_bytes=per_token,
        window_bytes=window,
        sequence_bytes=hca * HCA * 2 * head * 4,
    )


class _Block:
    """The tensors of one decoder block, by layer kind."""

    def __init__(self, facts: Facts) -> None:
        self.hidden, self.heads = facts.whole("hidden_size"), facts.whole("num_attention_heads")
        self.head, self.q_rank = facts.whole("head_dim"), facts.whole("q_lora_rank")
        self.o_rank, self.o_groups = facts.whole("o_lora_rank"), facts.whole("o_groups")
        self.width, self.experts = facts.whole("moe_intermediate_size"), facts.whole("n_routed_experts")
        self.shared, self.top_k = facts.whole("n_shared_experts", 1), facts.whole("num_experts_per_tok")
        self.vocabulary, self.streams = facts.whole("vocab_size"), facts.whole("hc_mult")
        self.index_heads, self.index_head = facts.whole("index_n_heads"), facts.whole("index_head_dim")

    def common(self, layers: tuple[int, ...], prefix: str = "layers.*", into: Category | None = None) -> list[Weight]:
        """What every block has. `into` puts all of it into one category."""

        def add(category: Category, path: str, rows: int, columns: int, **more) -> Weight:
            each = more.pop("each", 1)
            return Weight(
                category=into or category,
                path=f"{prefix}.{path}",
                rows=rows,
                columns=columns,
                count=each * max(len(layers), 1),
                layers=layers,
                **more,
            )

        wide, hidden, width, groups = self.heads * self.head, self.hidden, self.width, self.o_groups
        mixed = self.streams * (self.streams + STREAMS_EXTRA)
        attention = {
            "wq_a": (self.q_rank, hidden),
            "wq_b": (wide, self.q_rank),
            "wkv": (self.head, hidden),
            "wo_b": (hidden, groups * self.o_rank),
        }
        f32 = {"plain": Plain.f32}
        weights = [add(Category.attention, f"attn.{n}", *size, linear=True) for n, size in attention.items()]
        weights.append(
            add(Category.attention, "attn.wo_a", groups * self.o_rank, wide // groups, linear=True, groups=groups)
        )
        weights += [
            add(Category.norms, "attn.q_norm", 1, self.q_rank),
            add(Category.norms, "attn.kv_norm", 1, self.head),
            add(Category.attention, "attn.attn_sink", 1, self.heads, **f32),
            add(Category.norms, "attn_norm", 1, hidden),
            add(Category.norms, "ffn_norm", 1, hidden),
        ]
        for part in ("attn", "ffn"):
            weights += [
                add(Category.hyper, f"hc_{part}_fn", mixed, self.streams * hidden, **f32),
                add(Category.hyper, f"hc_{part}_base", 1, mixed, **f32),
                add(Category.hyper, f"hc_{part}_scale", 1, 3, **f32),
            ]
        matrices = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
        for name, (rows, columns) in matrices.items():
            size = (self.shared * rows, columns) if name != "w2" else (rows, self.shared * columns)
            weights.append(add(Category.shared, f"ffn.shared_experts.{name}", *size, linear=True))
            weights.append(
                add(Category.experts, f"ffn.experts.*.{name}", rows, columns, linear=True, each=self.experts)
            )
        return weights

    def compressor(self, ratio: int, layers: tuple[int, ...]) -> list[Weight]:
        """Compressor of ratio-4 and ratio-128 layers, and the indexer of the former; nothing of them is adapted."""
        if not ratio or not layers:
            return []
        overlap = 2 if ratio == CSA else 1
        weights = self._compress(Category.compressor, "attn.compressor", overlap, self.head, ratio, layers)
        if ratio == CSA:
            weights += self._compress(
                Category.indexer, "attn.indexer.compressor", overlap, self.index_head, ratio, layers
            )
            weights += [
                self._one(
                    Category.indexer,
                    "attn.indexer.wq_b",
                    self.index_heads * self.index_head,
                    self.q_rank,
                    layers,
                    linear=True,
                ),
                self._one(Category.indexer, "attn.indexer.weights_proj", self.index_heads, self.hidden, layers),
            ]
        return weights

    def routing(self, hashed: tuple[int, ...], scored: tuple[int, ...]) -> list[Weight]:
        """Router weights of all layers; a table by token id in the first, a bias in the others."""
        weights = []
        for layers in (hashed, scored):
            if layers:
                weights.append(self._one(Category.router, "ffn.gate", self.experts, self.hidden, layers))
        if hashed:
            weights.append(
                self._one(
                    Category.hash_table,
                    "ffn.gate.tid2eid",
                    self.vocabulary,
                    self.top_k,
                    hashed,
                    plain=Plain.i64,
                )
            )
        if scored:
            weights.append(self._one(Category.router, "ffn.gate.bias", 1, self.experts, scored, plain=Plain.f32))
        return weights

    def head_mixer(self, category: Category, prefix: str) -> list[Weight]:
        """The mixer that joins the streams before the output head."""
        sizes = {"hc_head_fn": (self.streams, self.streams * self.hidden), "hc_head_base": (1, self.streams)}
        sizes["hc_head_scale"] = (1, 1)
        return [
            Weight(category=category, path=f"{prefix}{name}", rows=rows, columns=columns, plain=Plain.f32)
            for name, (rows, columns) in sizes.items()
        ]

    def ahead(self, number: int) -> list[Weight]:
        """One multi-token-prediction block: a scored sliding-window block with projections and norms of its own."""
        prefix, hidden, mtp = f"mtp.{number}", self.hidden, Category.mtp
        weights = self.common((), prefix, mtp)
        weights += [
            Weight(category=mtp, path=f"{prefix}.ffn.gate", rows=self.experts, columns=hidden),
            Weight(category=mtp, path=f"{prefix}.ffn.gate.bias", rows=1, columns=self.experts, plain=Plain.f32),
        ]
        for name in ("e_proj", "h_proj"):
            weights.append(Weight(category=mtp, path=f"{prefix}.{name}", rows=hidden, columns=hidden, linear=True))
        for name in ("enorm", "hnorm", "norm"):
            weights.append(Weight(category=mtp, path=f"{prefix}.{name}", rows=1, columns=hidden))
        return weights + self.head_mixer(mtp, f"{prefix}.")

    def _compress(
        self, category: Category, path: str, overlap: int, head: int, ratio: int, layers: tuple[int, ...]
    ) -> list[Weight]:
        wide = overlap * head
        return [
            self._one(category, f"{path}.ape", ratio, wide, layers, plain=Plain.f32),
            self._one(category, f"{path}.wkv", wide, self.hidden, layers),
            self._one(category, f"{path}.wgate", wide, self.hidden, layers),
            self._one(category, f"{path}.norm", 1, head, layers),
        ]

    def _one(
        self,
        category: Category,
        path: str,
        rows: int,
        columns: int,
        layers: tuple[int, ...],
        *,
        linear: bool = False,
        plain: Plain = Plain.bf16,
    ) -> Weight:
        return Weight(
            category=category,
            path=f"layers.*.{path}",
            rows=rows,
            columns=columns,
            count=len(layers),
            layers=layers,
            linear=linear,
            plain=plain,
        )
