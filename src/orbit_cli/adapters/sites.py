"""Where an adapter sits: one linear, one projection of all routed experts of a layer, or what these experts get.

An AdaptedTensor is what the run prints before training (F7 of the field bugs: nothing is adapted in silence) and what
the bank lays its storage out by. Left out: the numbers (bank.py) and the modules (inject.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.types import AdapterSpec

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SHARED_PROJECTION = "gate_up_proj"  # of the rotation that all routed experts of a layer share


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedTensor:
    """One adapted weight, the same projection of `experts` experts, or gate and up of all experts of a layer at once.

    >>> AdaptedTensor(module="model.layers.3.mlp.experts", projection="gate_proj", experts=8, in_features=64,
    ...               out_features=32, shapes={"oft_R": (2, 32, 32)}, parameters=8 * 2 * 496).name
    'model.layers.3.mlp.experts.*.gate_proj'

    A shared rotation is one tensor, of a path that no weight has: model.layers.3.mlp.experts.gate_up_proj, experts=0.
    """

    module: str  # checkpoint path of the linear, or of the experts' container
    projection: str  # last path component: q_proj, gate_proj, ...
    experts: int  # 0: a plain linear, or a rotation that experts share
    in_features: int
    out_features: int
    shapes: dict[str, tuple[int, ...]]  # of each tensor that is multiplied by, for one linear (or one expert)
    parameters: int  # trainable numbers, over all experts

    @property
    def of_experts(self) -> bool:
        """Whether it acts in the routed experts of a layer."""
        return self.experts > 0 or self.projection == SHARED_PROJECTION

    @property
    def name(self) -> str:
        return f"{self.module}.*.{self.projection}" if self.experts else self.module

    @property
    def paths(self) -> list[str]:
        """Checkpoint module paths, one per expert in order (a plain linear has one)."""
        if not self.experts:
            return [self.module]
        return [f"{self.module}.{expert}.{self.projection}" for expert in range(self.experts)]


def adapted_tensor(
    spec: AdapterSpec, *, module: str, projection: str, experts: int, in_features: int, out_features: int
) -> AdaptedTensor:
    """The site with its shapes and parameter count under `spec`."""
    if spec.kind == "oft":
        b = spec.block_size
        shapes = {"oft_R": (in_features // b, b, b)}
        count = in_features // b * (b * (b - 1) // 2)
    else:
        shapes = {"lora_A": (spec.rank, in_features), "lora_B": (out_features, spec.rank)}
        count = spec.rank * (in_features + out_features)
    return AdaptedTensor(
        module=module,
        projection=projection,
        experts=experts,
        in_features=in_features,
        out_features=out_features,
        shapes=shapes,
        parameters=count * max(experts, 1),
    )
