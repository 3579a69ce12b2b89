"""Putting adapters on frozen linears and experts, by target name.

A target is the last component of a module's path (q_proj), as in PEFT; expert targets are projections of all routed
experts, with one adapter per expert, or one rotation of what all of them get. A name that matches nothing is an error:
nothing is left unadapted in silence.
Left out: building the model (orbit_cli.models) and the numbers (bank.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from orbit_cli.adapters.bank import AdapterBank
from orbit_cli.adapters.lora import low_rank
from orbit_cli.adapters.oft import rotate
from orbit_cli.adapters.sites import EXPERT_PROJECTIONS, SHARED_PROJECTION, AdaptedTensor, adapted_tensor
from orbit_cli.errors import ConfigError
from orbit_cli.types import AdapterSpec
from orbit_kernels.experts import ExpertAdapters, StackedAdapter

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Linear(Protocol):
    """A frozen linear, as far as injection cares."""

    in_features: int
    out_features: int
    adapter: object


class Experts(Protocol):
    """Frozen routed experts, as far as injection cares."""

    experts: int
    hidden: int
    intermediate: int
    adapter: object


def inject(
    linears: Mapping[str, Linear],
    experts: Mapping[str, Experts],
    spec: AdapterSpec,
    *,
    layers: list[int],
    device: torch.device,
    seed: int,
) -> AdapterBank:
    """Adapt the modules that `spec` names (checkpoint path -> module); `layers` empty means all decoder layers.

    The bank's `sites` are the receipt: every adapted tensor with shapes and counts. Raises ConfigError.
    """
    _check_layers(layers, [*linears, *experts])
    linears = _in_layers(linears, layers)
    experts = _in_layers(experts, layers)
    _check_targets(spec, linears, experts)
    chosen = {path: module for path, module in linears.items() if path.rsplit(".", 1)[-1] in spec.targets}
    sites = [_linear_site(spec, path, module) for path, module in chosen.items()]
    projections = _expert_projections(spec)
    sites += [
        _expert_site(spec, path, module, projection) for path, module in experts.items() for projection in projections
    ]  # layer by layer: the loop over modules below counts on it
    bank = AdapterBank(spec, sites, device=device, seed=seed)
    for index, module in enumerate(chosen.values()):
        module.adapter = LINEAR_ADAPTERS[spec.kind](bank, index)
    index = len(chosen)
    for module in experts.values() if projections else ():
        indices = {sites[i].projection: i for i in range(index, index + len(projections))}
        module.adapter = EXPERT_ADAPTERS[spec.expert_width](bank, indices)
        index += len(indices)
    return bank


def _expert_projections(spec: AdapterSpec) -> tuple[str, ...]:
    """Names of the sites of one layer's routed experts, in order."""
    if spec.expert_width == "shared":
        return (SHARED_PROJECTION,)
    return tuple(projection for projection in EXPERT_PROJECTIONS if projection in spec.expert_targets)


def _oft_linear(bank: AdapterBank, site: int) -> Callable:
    rotations = bank.leaf("oft_R", site)  # [n, b, b]

    def adapted(x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
        return linear(rotate(x, rotations)) if bank.enabled else linear(x)

    return adapted


def _lora_linear(bank: AdapterBank, site: int) -> Callable:
    a, b = bank.leaf("lora_A", site), bank.leaf("lora_B", site)  # [r, in], [out, r]
    scaling = bank.spec.scaling

    def adapted(x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
        return linear(x) + low_rank(x, a, b, scaling) if bank.enabled else linear(x)

    return adapted


LINEAR_ADAPTERS = {"oft": _oft_linear, "lora": _lora_linear}


def _oft_stack(bank: AdapterBank, site: int) -> StackedAdapter:
    return StackedAdapter(rotation=bank.leaf("oft_R", site))  # [E, n, b, b]


def _lora_stack(bank: AdapterBank, site: int) -> StackedAdapter:
    a, b = bank.leaf("lora_A", site), bank.leaf("lora_B", site)  # [E, r, in], [E, out, r]
    return StackedAdapter(lora_a=a, lora_b=b, scaling=bank.spec.scaling)


STACKED_ADAPTERS = {"oft": _oft_stack, "lora": _lora_stack}


def _per_expert(bank: AdapterBank, sites: dict[str, int]) -> Callable:
    """sites: projection -> number of its site. What is returned is called at every forward with hidden states [T, H]:
    what the experts get, and adapters of their own."""
    stacks = {name.removesuffix("_proj"): STACKED_ADAPTERS[bank.spec.kind](bank, i) for name, i in sites.items()}
    adapters = ExpertAdapters(**stacks)
    return lambda x: (x, adapters if bank.enabled else None)


def _shared(bank: AdapterBank, sites: dict[str, int]) -> Callable:
    """As `_per_expert`: the input is turned once for all experts, which have nothing of their own."""
    rotations = bank.leaf("oft_R", sites[SHARED_PROJECTION])  # [n, b, b]
    return lambda x: (rotate(x, rotations) if bank.enabled else x, None)


EXPERT_ADAPTERS = {"per_expert": _per_expert, "shared": _shared}


def _check_layers(layers: list[int], paths: list[str]) -> None:
    present = sorted({int(found[1]) for path in paths if (found := LAYER.search(path))})
    missing = [layer for layer in layers if layer not in present]
    if missing:
        raise ConfigError(
            f"adapter.layers names layer {missing[0]}, but the model has layers {present[0]} to {present[-1]}; "
            "set numbers in that range, or [] for all"
        )


def _in_layers(modules: Mapping[str, object], layers: list[int]) -> dict:
    if not layers:
        return dict(modules)
    return {path: m for path, m in modules.items() if (found := LAYER.search(path)) and int(found[1]) in layers}


def _check_targets(spec: AdapterSpec, linears: Mapping[str, Linear], experts: Mapping[str, Experts]) -> None:
    names = sorted({path.rsplit(".", 1)[-1] for path in linears})
    for target in spec.targets:
        if target not in names:
            near = difflib.get_close_matches(target, names, n=3, cutoff=0.3) or names
            raise ConfigError(
                f"adapter.targets has {target!r}, which matches no linear of the adapted layers; "
                f"nearest: {', '.join(near)} (all: {', '.join(names)})"
            )
    for target in spec.expert_targets:
        if target not in EXPERT_PROJECTIONS:
            near = difflib.get_close_matches(target, EXPERT_PROJECTIONS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"adapter.expert_targets has {target!r}; experts have {', '.join(EXPERT_PROJECTIONS)} (nearest: {near})"
            )
    if spec.expert_targets and not experts:
        raise ConfigError(
            f"adapter.expert_targets={list(spec.expert_targets)} matches nothing: the adapted layers have no routed "
            "experts; set adapter.expert_targets=[]"
        )


def _linear_site(spec: AdapterSpec, path: str, module: Linear) -> AdaptedTensor:
    _check_block(spec, path, module.in_features)
    return adapted_tensor(
        spec,
        module=path,
        projection=path.rsplit(".", 1)[-1],
        experts=0,
        in_features=module.in_features,
        out_features=module.out_features,
    )


def _expert_site(spec: AdapterSpec, path: str, module: Experts, projection: str) -> AdaptedTensor:
    if projection == SHARED_PROJECTION:
        name, width = f"{path}.{projection}", 2 * module.intermediate
        _check_block(spec, name, module.hidden)
        return adapted_tensor(
            spec, module=name, projection=projection, experts=0, in_features=module.hidden, out_features=width
        )
    down = projection == "down_proj"
    inputs, outputs = (module.intermediate, module.hidden) if down else (module.hidden, module.intermediate)
    _check_block(spec, f"{path}.*.{projection}", inputs)
    return adapted_tensor(
        spec, module=path, projection=projection, experts=module.experts, in_features=inputs, out_features=outputs
    )


def _check_block(spec: AdapterSpec, path: str, in_features: int) -> None:
    if spec.kind == "oft" and in_features % spec.block_size:
        fitting = [b for b in (16, 32, 64, 128) if in_features % b == 0]
        raise ConfigError(
            f"adapter.block_size={spec.block_size} does not divide the {in_features} inputs of {path}; "
            f"set one of {fitting or [b for b in range(2, in_features + 1) if in_features % b == 0]}"
        )
