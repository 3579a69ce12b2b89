"""What the planner's tests share: a plan from overrides, and figures in the units of the published tables."""

from __future__ import annotations

from functools import cache

from orbit_cli.config.compose import compose
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import AdapterConfig, AdapterKind
from orbit_cli.planner.adapters import ROLES, sites
from orbit_cli.planner.model import Model, read_model
from orbit_cli.planner.part import BASE, Side
from orbit_cli.planner.plan import Phase, Plan, make_plan
from orbit_cli.planner.shape import ModelShape

FRONTIER = ("kimi_k26", "deepseek_v4_flash", "deepseek_v4_pro")
EXPERTS = ["gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
ATTENTION += ["wq_a", "wq_b", "wkv", "wo_a", "wo_b"]
MLP = [*EXPERTS, "w1", "w2", "w3"]


@cache
def planned(*overrides: str, trains: bool = True, evaluates: bool = False) -> Plan:
    return make_plan(composed(*overrides), trains=trains, evaluates=evaluates)


@cache
def composed(*overrides: str) -> OrbitConfig:
    return compose(list(overrides))


@cache
def model_of(name: str) -> Model:
    return read_model(composed(f"model={name}"))


def bases(phase: Phase, side: Side) -> float:
    """GB of one side's base."""
    return sum(part.nbytes for part in phase.parts if part.side is side and part.name.startswith(BASE)) / 1e9


def adapter(kind: str, size: int, targets: list[str], experts: bool) -> AdapterConfig:
    return AdapterConfig(
        kind=AdapterKind(kind),
        targets=targets,
        expert_targets=EXPERTS if experts else [],
        block_size=size,
        rank=size,
    )


def millions(shape: ModelShape, config: AdapterConfig, *, fused: bool = False) -> float:
    """Parameters of an adapter; `fused` lets up_proj take gate_proj's rotation."""
    counted = [site for site in sites(shape, config) if not (fused and ROLES.get(site.name) == "up_proj")]
    return sum(site.trained(config) for site in counted) / 1e6
