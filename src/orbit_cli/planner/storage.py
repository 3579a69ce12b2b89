"""Bytes, tensors and stored elements of a model's weights: the published formats, byte for byte.

int4     compressed-tensors pack-quantized: int32 words of 8, BF16 scale per 32, shape as two integers
mxfp4    E2M1 in pairs, one E8M0 scale byte per 32 (OCP MX, 2310.10537)
nvfp4    E2M1 in pairs, one E4M3 scale byte per 16, one float32 per tensor
fp8      E4M3, one scale per 128x128 block: E8M0 byte (DeepSeek V4) or float32 (DeepSeek V3, 2412.19437)

Which tensors are quantised: the checkpoint's own quantization_config where the run uses it as it is, otherwise what
`orbit quantize` would do with quantization.targets and ignore. No torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from orbit_cli.planner.shape import Category, ModelShape, Plain, Weight

GROUP = {"int4": 32, "mxfp4": 32, "nvfp4": 16, "fp8": 1}
_PLAIN_BYTES = {Plain.bf16: 2, Plain.f32: 4, Plain.i64: 8}
NEVER = frozenset(
    {"gate", "router", "shared_expert_gate", "embed_tokens", "lm_head", "vision_tower", "mm_projector", "visual"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Size of something in files: bytes, tensors, elements (as stored: a packed word is one element)."""

    nbytes: int = 0
    tensors: int = 0
    elements: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(
            nbytes=self.nbytes + other.nbytes,
            tensors=self.tensors + other.tensors,
            elements=self.elements + other.elements,
        )

    def times(self, count: int) -> Stored:
        return Stored(nbytes=self.nbytes * count, tensors=self.tensors * count, elements=self.elements * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Which number format each weight of a base has."""

    formats: dict[str, str]  # category name -> format, for checkpoints whose files say so; "*" for all linears
    targets: tuple[str, ...] = ()  # path components that are quantised
    ignore: tuple[str, ...] = ()  # paths, components or re:REGEX that are not
    scale_bytes: int = 4  # FP8: bytes of a block's scale
    shape_bytes: int = 4  # INT4: bytes of one integer of weight_shape

    def format_of(self, weight: Weight) -> str:
        """Number format of a weight, or "" for one that is stored plainly."""
        if not weight.linear:
            return ""
        first = weight.layers[0] if weight.layers else 0  # checkpoints that list ignored modules list every layer's
        path = weight.path.replace("layers.*", f"layers.{first}", 1).replace("*", "0")
        parts = path.split(".")
        kind = "experts" if "experts" in parts else weight.category.name  # experts of a block ahead are experts too
        named = self.formats.get(kind) or self.formats.get("*", "")
        if named in ("", "bf16"):
            return ""
        if NEVER.intersection(parts) or weight.columns % GROUP[named]:
            return ""
        if self.targets and not any(target in parts for target in self.targets):
            return ""
        return "" if any(_matches(entry, path, parts) for entry in self.ignore) else named


def stored(weight: Weight, rules: Rules) -> Stored:
    """Size in files of all `count` tensors of a weight."""
    return one_stored(weight, rules.format_of(weight), rules).times(weight.count)


def one_stored(weight: Weight, number_format: str, rules: Rules) -> Stored:
    """Size of one tensor with its scales."""
    rows, columns = weight.rows, weight.columns
    n = rows * columns
    if not number_format:
        return Stored(nbytes=n * _PLAIN_BYTES[weight.plain], tensors=1, elements=n)
    if number_format == "int4":
        words, scales = rows * math.ceil(columns / 8), rows * columns // 32
        return Stored(nbytes=4 * words + 2 * scales + 2 * rules.shape_bytes, tensors=3, elements=words + scales + 2)
    if number_format == "mxfp4":
        return Stored(nbytes=n // 2 + n // 32, tensors=2, elements=n // 2 + n // 32)
    if number_format == "nvfp4":
        return Stored(nbytes=n // 2 + n // 16 + 4, tensors=3, elements=n // 2 + n // 16 + 1)
    assert number_format == "fp8", number_format
    blocks = math.ceil(rows / 128) * math.ceil(columns / 128)
    return Stored(nbytes=n + rules.scale_bytes * blocks, tensors=2, elements=n + blocks)


def total(shape: ModelShape, rules: Rules) -> Stored:
    """Size of the whole checkpoint, headers of the files left out."""
    return sum((stored(weight, rules) for weight in shape.weights), start=Stored())


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One category of the base in memory; counted once for a model and used for every layout."""

    category: Category
    parameters: int
    quantised: int  # of these, stored in a number format
    quantised_bytes: int  # with scales
    plain: int  # numbers that take the dtype of the activations
    fixed_bytes: int  # float32 and integer tensors, which stay as they are

    def nbytes(self, plain_bytes: int) -> int:
        """Bytes with `plain_bytes` for each number that no format stores."""
        return self.quantised_bytes + self.plain * plain_bytes + self.fixed_bytes


def held_by_category(shape: ModelShape, rules: Rules) -> tuple[Held, ...]:
    """Every category of the model in memory. Blocks that only predict ahead are not loaded."""
    found = []
    for category in Category:
        weights = shape.of(category)
        if not weights or category is Category.mtp:
            continue
        coded = [w for w in weights if rules.format_of(w)]
        rest = [w for w in weights if not rules.format_of(w)]
        found.append(
            Held(
                category=category,
                parameters=sum(w.parameters for w in weights),
                quantised=sum(w.parameters for w in coded),
                quantised_bytes=sum(stored(w, rules).nbytes - _only_in_files(w, rules) for w in coded),
                plain=sum(w.parameters for w in rest if w.plain is Plain.bf16),
                fixed_bytes=sum(w.parameters * _PLAIN_BYTES[w.plain] for w in rest if w.plain is not Plain.bf16),
            )
        )
    return tuple(found)


def widest_decoded(shape: ModelShape, rules: Rules) -> tuple[int, str]:
    """Numbers and name of the largest weight that is decoded at a time; gate and up of an expert go together."""
    widest = (0, "no quantised weight")
    for w in shape.weights:
        if w.category is not Category.mtp and rules.format_of(w):
            pair = w.category is Category.experts and w.name in ("gate_proj", "w1")
            widest = max(widest, (w.rows * w.columns * (2 if pair else 1), w.name))
    return widest


def largest_unit(shape: ModelShape, rules: Rules, ranks: int) -> int:
    """Bytes of the largest thing that a fully sharded base gathers: a weight, or 1/ranks of a layer's experts."""
    sizes = []
    for w in shape.weights:
        if w.category is not Category.mtp:
            per_layer = stored(w, rules).nbytes // max(len(w.layers), 1)
            sizes.append(per_layer // ranks if w.category is Category.experts else per_layer)
    return max(sizes)


def _only_in_files(weight: Weight, rules: Rules) -> int:
    """Bytes of INT4's weight_shape, which is read and not kept."""
    return 2 * rules.shape_bytes * weight.count if rules.format_of(weight) == "int4" else 0


def _matches(entry: str, path: str, parts: list[str]) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], path) is not None
    return entry == path or entry in parts
