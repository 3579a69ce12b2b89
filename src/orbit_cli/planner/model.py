"""The model of a plan: its shape and what its base takes, counted once and used for every layout that is tried."""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import ConfigError
from orbit_cli.planner.checkpoint import facts_of
from orbit_cli.planner.families import base_rules, published_rules, shape_of
from orbit_cli.planner.shape import Category, ModelShape, Weight
from orbit_cli.planner.storage import Held, Rules, held_by_category, total, widest_decoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a plan needs of the model."""

    shape: ModelShape
    rules: Rules  # of the base that is used
    held: tuple[Held, ...]
    widest: tuple[int, str]  # the largest decoded weight
    quantised: tuple[Weight, ...]  # those that a number format stores and that are loaded
    checkpoint_bytes: int  # of the published files
    base_bytes: int  # of the base that is used, as files


def read_model(config: OrbitConfig) -> Model:
    """The config's model. Raises ConfigError or CheckpointError for one that cannot be sized or is another."""
    facts = facts_of(config.model)
    shape, published = shape_of(facts), published_rules(facts)
    rules = base_rules(config.model, config.quantization, published)
    if rules.targets and not any(rules.format_of(weight) for weight in shape.weights):
        wanted = config.quantization
        raise ConfigError(
            f"quantization.targets={list(wanted.targets)} with quantization.ignore={list(wanted.ignore)} matches no "
            f"linear of {config.model.name} that {wanted.format} can store; set quantization.targets=[self_attn,mlp] "
            "or quantization=bf16"
        )
    return Model(
        shape=shape,
        rules=rules,
        held=held_by_category(shape, rules),
        widest=widest_decoded(shape, rules),
        quantised=tuple(w for w in shape.weights if w.category is not Category.mtp and rules.format_of(w)),
        checkpoint_bytes=total(shape, published).nbytes,
        base_bytes=total(shape, rules).nbytes,
    )
