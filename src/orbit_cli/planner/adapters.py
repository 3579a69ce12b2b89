"""How many numbers an adapter has, and where the layouts put them. No torch.

OFT (2306.07280): a rotation of each linear's input, in K/b blocks of b(b-1)/2 trained numbers, multiplied as K/b blocks
of b^2. LoRA (2106.09685): r (K + N) numbers for a linear of K inputs and N outputs. Routed experts have these each for
itself, or share one rotation of their input in each layer (adapter.expert_width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from orbit_cli.config.schema.base import AdapterConfig, AdapterKind, ExpertWidth
from orbit_cli.engine.targets import FAMILIES, check_names, supported_targets
from orbit_cli.errors import ConfigError
from orbit_cli.planner.shape import Category, ModelShape, Weight

ROLES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
ROLES |= {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # DeepSeek V4's names
ADAPTABLE = (Category.attention, Category.shared, Category.dense)
# What engines multiply as one linear: slots exist for all of it as soon as one of it is adapted.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
BLOCKS = (8, 16, 32, 64, 128, 256)  # sizes that are suggested where they fit
ROW_PARALLEL = ("o_proj", "down_proj", "wo_b", "w2")  # their input is split over tensor-parallel ranks
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv")  # every rank has all of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """All adapted linears of one name and shape.

    >>> Site(name="o_proj", inputs=8192, outputs=7168, linears=61, experts=False).trained(AdapterConfig())
    7745536
    """

    name: str
    inputs: int
    outputs: int
    linears: int
    experts: bool  # one for each routed expert
    shared: bool = False  # one for all routed experts of a layer

    def trained(self, adapter: AdapterConfig) -> int:
        """Numbers that the optimiser moves."""
        if adapter.kind is AdapterKind.oft:
            return self.linears * self.inputs * (adapter.block_size - 1) // 2
        return self.linears * adapter.rank * (self.inputs + self.outputs)

    def multiplied(self, adapter: AdapterConfig) -> int:
        """Numbers that a forward pass multiplies by."""
        if adapter.kind is AdapterKind.oft:
            return self.linears * self.inputs * adapter.block_size
        return self.trained(adapter)

    def multiplied_on_rank(self, adapter: AdapterConfig, ranks: int) -> float:
        """The share of `multiplied` that one of `ranks` tensor-parallel ranks holds."""
        row = self.name in ROW_PARALLEL
        if ranks == 1 or self.name in WHOLE:
            return self.multiplied(adapter)
        if adapter.kind is AdapterKind.oft:
            return self.multiplied(adapter) / (ranks if row or self.name == "wo_a" else 1)
        a, b = (adapter.rank * self.linears * size for size in (self.inputs, self.outputs))
        return a / ranks + b if row else a + b / ranks


def on_gpu(found: list[Site], adapter: AdapterConfig, share: Callable[[Category], float]) -> tuple[int, int]:
    """(trained, multiplied) numbers of these sites on one GPU, of which `share` says how they are split."""
    trained = multiplied = 0.0
    for site in found:
        part = share(Category.experts if site.experts else Category.attention)
        trained += site.trained(adapter) * part
        multiplied += site.multiplied(adapter) * part
    return round(trained), round(multiplied)


def check_targets(shape: ModelShape, adapter: AdapterConfig, name: str) -> None:
    """Refuse what training would refuse of the model `name`: linears that match nothing and layers that are not there.
    Raises ConfigError."""
    absent = [layer for layer in adapter.layers if not 0 <= layer < shape.layers]
    if absent:
        raise ConfigError(
            f"adapter.layers names layer {absent[0]}, but the model has layers 0 to {shape.layers - 1}; set numbers in "
            "that range, or [] for all"
        )
    linears = [w.name for w in shape.weights if w.category in ADAPTABLE and w.linear]
    experts = [ROLES[w.name] for w in shape.of(Category.experts)]
    problem = f"which matches no linear of {shape.called(name)}"
    if shape.model_type in FAMILIES:
        facts = {"model_type": shape.model_type, "q_lora_rank": "q_b_proj" in linears}
        linears, experts = supported_targets(facts, adapter.kind)
        problem = f"which the engine cannot serve as {adapter.kind} on {shape.called(name)}"
    check_names("targets", adapter.targets, list(dict.fromkeys(linears)), problem)
    check_names("expert_targets", adapter.expert_targets, list(dict.fromkeys(experts)), problem)
    found = sites(shape, adapter)
    dense = {site.name for site in found if not (site.experts or site.shared)}
    routed = {ROLES[site.name] for site in found if site.experts}
    if any(site.shared for site in found):
        routed.update(adapter.expert_targets)
    for key, wanted, names in (("targets", adapter.targets, dense), ("expert_targets", adapter.expert_targets, routed)):
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ConfigError(
                f"adapter.{key} has {missing[0]!r}, which layers {adapter.layers} do not have; set adapter.layers=[] "
                "for all"
            )


def check_blocks(trained: list[Site], adapter: AdapterConfig, name: str, ranks: int = 1) -> None:
    """Refuse rotation blocks that do not divide the inputs of a linear of the model `name`, or the share of them that
    one of `ranks` tensor-parallel ranks of the engine has. Raises ConfigError with those that do."""
    if adapter.kind is not AdapterKind.oft:
        return
    split = {site: site.inputs // (ranks if site.name in ROW_PARALLEL and not site.experts else 1) for site in trained}
    odd = next((site for site in trained if split[site] % adapter.block_size), None)
    if odd is None:
        return
    common = math.gcd(*split.values())
    fitting = [b for b in BLOCKS if common % b == 0] or [b for b in range(2, min(common, 1024) + 1) if common % b == 0]
    what = f"adapter.block_size={adapter.block_size} does not divide the {split[odd]} inputs of {odd.name} in {name}"
    if split[odd] != odd.inputs:
        what += f" on each of engine.tensor_parallel={ranks} ranks"
    if fitting:
        *but_last, last = map(str, fitting[-8:])
        raise ConfigError(f"{what}; set adapter.block_size to {', '.join(but_last)}{' or ' * bool(but_last)}{last}")
    widths = ", ".join(map(str, sorted(set(split.values()))))
    raise ConfigError(f"{what}, and no block divides all of its widths ({widths}); set adapter=lora")


def sites(shape: ModelShape, adapter: AdapterConfig) -> list[Site]:
    """What `adapter` adapts in this model; names that match nothing are simply not there."""
    found = [_site(w, adapter) for w in shape.weights if _is_target(w, adapter)]
    return [site for site in [*found, *_shared_sites(shape, adapter)] if site.linears]


def served_sites(shape: ModelShape, adapter: AdapterConfig) -> list[Site]:
    """As `sites`, with the linears that the engine fuses with adapted ones."""
    names = set(adapter.targets)
    for group in FUSED:
        if names.intersection(group):
            names.update(group)
    weights = [w for w in shape.weights if w.category in ADAPTABLE and w.linear and w.name in names]
    weights += [w for w in shape.weights if w.category is Category.experts and _is_target(w, adapter)]
    return [_site(w, adapter, every_layer=True) for w in weights] + _shared_sites(shape, adapter, every_layer=True)


def own_expert_inputs(adapter: AdapterConfig) -> bool:
    """Whether experts turn their inputs themselves: a token then has a row for gate and one for up in each of them."""
    each = adapter.kind is AdapterKind.oft and adapter.expert_width is ExpertWidth.per_expert
    return each and bool({"gate_proj", "up_proj"}.intersection(adapter.expert_targets))


def _shared_sites(shape: ModelShape, adapter: AdapterConfig, every_layer: bool = False) -> list[Site]:
    """One rotation for each layer with routed experts, of what their gate and up get."""
    if adapter.expert_width is not ExpertWidth.shared:
        return []
    gates = [weight for weight in shape.of(Category.experts) if ROLES.get(weight.name) == "gate_proj"]
    return [
        Site(
            name="gate_up_proj",
            inputs=weight.columns,
            outputs=2 * weight.rows,
            linears=len(_chosen(weight, adapter, every_layer)),
            experts=False,
            shared=True,
        )
        for weight in gates
    ]


def _is_target(weight: Weight, adapter: AdapterConfig) -> bool:
    if not weight.linear:
        return False
    if weight.category is Category.experts:
        each = adapter.expert_width is ExpertWidth.per_expert
        return each and ROLES.get(weight.name) in adapter.expert_targets
    return weight.category in ADAPTABLE and weight.name in adapter.targets


def _site(weight: Weight, adapter: AdapterConfig, every_layer: bool = False) -> Site:
    return Site(
        name=weight.name,
        inputs=weight.columns,
        outputs=weight.rows // weight.groups,
        linears=weight.per_layer * len(_chosen(weight, adapter, every_layer)) * weight.groups,
        experts=weight.category is Category.experts,
    )


def _chosen(weight: Weight, adapter: AdapterConfig, every_layer: bool) -> tuple[int, ...]:
    """The weight's layers that are adapted; `every_layer`: the engine has slots in all of them."""
    if every_layer or not adapter.layers:
        return weight.layers
    return tuple(layer for layer in weight.layers if layer in adapter.layers)
