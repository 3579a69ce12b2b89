"""The published memory study of frozen-base RL: weights and gradients of four recipes over model size.

The study counts N parameters at w bits and their gradients at g bits, N (w + g) / 8 bytes, with N rounded to three
digits: full fine-tuning in BF16 with BF16 gradients, FP8 weights with BF16 or FP8 gradients, and a frozen 4-bit base
with an adapter of a bits per parameter, weight and gradient each: N (4 + 2a) / 8. For Kimi-K2.6 that gives its 4,120
and 528 GB with OFT in blocks of 32 on the published recipe's linears, one rotation for gate and up together.

What the formula leaves out is in the last columns: the published files hold scales and BF16 parts (4.5 bit for INT4
with a BF16 scale per 32, 4.25 for MXFP4), and no recipe counts optimiser moments, master weights, activations, caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.compose import compose
from orbit_cli.config.schema.base import AdapterConfig, AdapterKind
from orbit_cli.planner.adapters import ROLES, Site, sites
from orbit_cli.planner.model import read_model
from orbit_cli.planner.shape import Category, ModelShape

MODELS = ("qwen3_4b", "qwen3_30b_a3b", "deepseek_v4_flash", "kimi_k26", "deepseek_v4_pro")
RECIPES = {"BF16 + BF16": (16, 16), "FP8 + BF16": (8, 16), "FP8 + FP8": (8, 8)}  # weight and gradient bits
FROZEN = "4 bit + adapter"
BLOCK = 32  # rotations of the study's adapter
ADAPTER_BITS = 16
# Linears of the published recipes: all but the down-projections to a latent and what routes or compresses.
TARGETS = ["q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS += ["wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model of the study."""

    name: str
    parameters: int
    rounded_parameters: float  # the study's N
    recipe_bytes: dict[str, float]  # recipe -> weights and gradients
    adapter_bits: float  # per base parameter
    adapter_parameters: int
    checkpoint_bytes: int  # of the files as published
    base_bytes: int  # of the 4-bit base: those files, or as orbit quantize writes them
    base_and_adapter_bytes: int  # that base, and the adapter with its gradients in BF16


def study(models: tuple[str, ...] = MODELS) -> list[Row]:
    """The four recipes for models of conf/model, by size."""
    return sorted((_row(name) for name in models), key=lambda row: row.parameters)


def recipe_bytes(parameters: float, weight_bits: float, gradient_bits: float) -> float:
    """N (w + g) / 8."""
    return parameters * (weight_bits + gradient_bits) / 8


def rounded(parameters: int) -> float:
    """The study's N: three digits.

    >>> rounded(1_026_879_376_368)
    1030000000000.0
    """
    return float(f"{parameters:.2e}")


def adapter_count(shape: ModelShape, *, block: int = BLOCK) -> int:
    """Parameters of the study's adapter: OFT on every target and expert, gate and up sharing one rotation."""
    config = AdapterConfig(
        kind=AdapterKind.oft, targets=TARGETS, expert_targets=["gate_proj", "up_proj", "down_proj"], block_size=block
    )
    return sum(site.trained(config) for site in sites(shape, config) if not _shares(site))


def _shares(site: Site) -> bool:
    """up_proj of an MLP, which takes gate_proj's rotation."""
    return ROLES.get(site.name) == "up_proj"


def _row(name: str) -> Row:
    model = read_model(compose([f"model={name}"]))
    shape = model.shape
    n, numbers = rounded(shape.parameters), adapter_count(shape)
    bits = ADAPTER_BITS * numbers / shape.parameters
    recipes = {recipe: recipe_bytes(n, *pair) for recipe, pair in RECIPES.items()}
    recipes[FROZEN] = recipe_bytes(n, 4 + bits, bits)
    coded = any(held.quantised for held in model.held if held.category in (Category.experts, Category.dense))
    assert coded, f"{name} has no 4-bit base in its default config"
    return Row(
        name=name,
        parameters=shape.parameters,
        rounded_parameters=n,
        recipe_bytes=recipes,
        adapter_bits=bits,
        adapter_parameters=numbers,
        checkpoint_bytes=model.checkpoint_bytes,
        base_bytes=model.base_bytes,
        base_and_adapter_bytes=model.base_bytes + 2 * numbers * ADAPTER_BITS // 8,
    )
