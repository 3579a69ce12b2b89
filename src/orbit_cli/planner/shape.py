"""What a model is to the planner: its stored tensors by category, and the few sizes that memory depends on.

A Weight stands for all equal tensors of the model. Families (dense.py, latent.py, deepseek_v4.py) list them from a
config.json; how many bytes each takes is storage.py's business. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Category(StrEnum):
    """What a tensor belongs to; the rows of the plan's table. The value is what people read."""

    experts = "routed experts"
    attention = "attention"
    compressor = "compressor"
    indexer = "indexer"
    shared = "shared expert"
    dense = "dense MLP"
    embeddings = "embeddings and head"
    hyper = "hyper-connections"
    router = "router"
    hash_table = "hash routing table"
    norms = "norms"
    vision = "vision tower"
    mtp = "multi-token prediction"


class Plain(StrEnum):
    """How a family stores a tensor that no number format touches."""

    bf16 = "bf16"
    f32 = "f32"
    i64 = "i64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """`count` equal stored tensors [rows, columns] (a vector has rows=1).

    >>> Weight(category=Category.attention, path="model.layers.*.self_attn.o_proj", rows=7168, columns=8192, count=61,
    ...        linear=True).parameters
    3581935616
    """

    category: Category
    path: str  # module path as a checkpoint has it; * for a layer or expert number
    rows: int
    columns: int
    count: int = 1
    layers: tuple[int, ...] = ()  # decoder layers that have it; empty: outside the decoder
    linear: bool = False  # a matrix that a number format may store and an adapter may sit on
    groups: int = 1  # independent linears stacked along the rows, each with `columns` inputs of its own
    plain: Plain = Plain.bf16

    @property
    def name(self) -> str:
        """What adapter.targets calls it."""
        return self.path.rpartition(".")[2]

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.count

    @property
    def per_layer(self) -> int:
        """Tensors in one layer that has it: 1, or the number of experts."""
        return self.count // len(self.layers) if self.layers else self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheShape:
    """The key-value cache: bytes that grow with tokens, and bytes that each running sequence needs anyway."""

    elements: int  # numbers a token adds over all layers; multiplied by the cache's bytes per number
    heads: int  # key-value heads that tensor parallelism can split; 1 for a latent that every rank holds
    formula: str
    packed_bytes: float = 0.0  # a token's bytes where the engine has its own packing (DeepSeek V4); replaces elements
    window_bytes: float = 0.0  # bytes of sliding window and state that the engine adds to each pool token
    sequence_bytes: int = 0  # state of each running sequence


@dataclass(frozen=True, slots=True)
class Kept:
    """Numbers of one token that a layer keeps for the backward pass.

    >>> Kept("input of the norm, float32", 7168, 4).bytes(2)
    28672
    """

    what: str
    numbers: int
    width: int = 0  # bytes of a number; 0: those of the compute dtype
    only_for: tuple[str, ...] = ()  # linears of which one must be adapted for it to be kept; empty: always kept

    def bytes(self, dtype_bytes: int) -> int:
        return self.numbers * (self.width or dtype_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationShape:
    """What one token leaves for the backward pass in one decoder layer, in three kinds of layer."""

    attention: tuple[Kept, ...]
    dense: tuple[Kept, ...] = ()
    experts: tuple[Kept, ...] = ()  # PyTorch's path: each expert keeps its own rows
    packed_experts: tuple[Kept, ...] = ()  # the GPU kernels' path (orbit_kernels.expert_layer)
    dense_layers: int = 0
    expert_layers: int = 0
    stream: int = 0  # numbers of the residual stream a token carries from layer to layer
    dense_width: int = 0  # of a dense MLP
    expert_width: int = 0  # of one routed expert
    probabilities: int = 0  # attention probabilities kept per pair of tokens and layer where no fused attention fits
    fused_on_gpu: bool = True  # whether a GPU has a fused attention for this model


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """One model, as far as memory goes."""

    model_type: str
    hidden: int
    layers: int
    vocabulary: int
    heads: int
    weights: tuple[Weight, ...]
    cache: CacheShape
    activations: ActivationShape
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    longest: int = 0  # max_position_embeddings; 0 if the config does not say
    stored_formats: tuple[str, ...] = field(default=())  # number formats of the published files; empty: bfloat16

    def of(self, category: Category) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.category is category)

    def called(self, name: str) -> str:
        """A model as the person named it, with the type that its files have where that is another."""
        return name if name == self.model_type else f"{name} (model type {self.model_type})"

    @property
    def widest(self) -> int:
        """Numbers of one token in the widest tensors inside a layer, in PyTorch's path."""
        a, k = self.activations, self.experts_per_token
        return max(4 * a.dense_width, 4 * k * a.expert_width, k * self.hidden, self.hidden)

    @property
    def parameters(self) -> int:
        """All stored parameters, vision and multi-token prediction included; integer tables are none."""
        return sum(w.parameters for w in self.weights if w.plain is not Plain.i64)

    @property
    def active_parameters(self) -> int:
        """Parameters at work for one token, as published counts have them: embeddings and vision in, prediction out."""
        total = 0
        for weight in self.weights:
            if weight.plain is Plain.i64 or weight.category is Category.mtp:
                continue
            share = self.experts_per_token / self.experts if weight.category is Category.experts else 1
            total += round(weight.parameters * share)
        return total
