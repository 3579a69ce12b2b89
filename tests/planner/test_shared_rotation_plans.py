"""One rotation for all routed experts of a layer, as it is counted: against a model that is built, and on Kimi-K2.6."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planning import composed, planned

from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.compose import compose
from orbit_cli.errors import ConfigError
from orbit_cli.models.build import build_model
from orbit_cli.planner.adapters import served_sites, sites
from orbit_cli.planner.advice import changes, nearest_fit
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.planner.plan import Plan
from orbit_cli.quantization.base_model import prepare_base

GATE_UP, SHARED = "adapter.expert_targets=[gate_proj,up_proj]", "adapter.expert_width=shared"
EVERY = "adapter.expert_targets=[gate_proj,up_proj,down_proj]"
KIMI = ("model=kimi_k26", "hardware=b200x8")


def slots(plan: Plan) -> int:
    return next(part for part in plan.phases[0].parts if part.name == "adapter slots").nbytes


@pytest.mark.parametrize("layers", ["[]", "[1]"])
@pytest.mark.parametrize("name", ["tiny_moe", "tiny_mla_moe"])
def test_the_adapters_bytes_are_those_of_the_trainers_model(name: str, layers: str, tmp_path: Path) -> None:
    cache, chosen = f"quantization.cache_dir={tmp_path}", f"adapter.layers={layers}"
    config = compose([f"model={name}", "adapter.targets=[o_proj]", GATE_UP, SHARED, chosen, cache])
    base = prepare_base(config.model, config.quantization, lambda text: None)
    spec, where = spec_from_config(config.adapter), {"device": "cpu", "dtype": torch.float32}
    model = build_model(base, spec, layers=config.adapter.layers, seed=0, **where)
    planned_parts, held = planned_peaks(config)["parts"], model.memory()
    assert (planned_parts["adapter"], planned_parts["adapter_grads"]) == (held["adapter"], held["adapter_grads"])
    shape = planned(f"model={name}").model.shape
    assert sum(site.trained(config.adapter) for site in sites(shape, config.adapter)) == sum(
        site.parameters for site in model.adapted
    )


def test_kimi_has_one_rotation_of_its_hidden_states_per_layer() -> None:
    """60 layers of 7168/32 blocks of 496 numbers; whole on every rank of the engine and every GPU of the trainer."""
    without, shared, each = planned(*KIMI), planned(*KIMI, GATE_UP, SHARED), planned(*KIMI, EVERY)
    numbers = shared.adapter_parameters - without.adapter_parameters
    assert numbers == 60 * 7168 // 32 * 496 == 6_666_240
    assert (each.adapter_parameters - without.adapter_parameters) / numbers > 800
    shape, adapter = shared.model.shape, shared.config.adapter
    (site,) = (site for site in served_sites(shape, adapter) if site.shared)
    assert (site.inputs, site.linears, site.experts) == (7168, 60, False)
    matrices = 60 * 7168 * 32
    assert site.multiplied(adapter) == site.multiplied_on_rank(adapter, 8) == matrices
    versions = shared.config.engine.live_versions + 1
    assert slots(shared) - slots(without) == 2 * versions * matrices
    split = planned(*KIMI, GATE_UP, SHARED, "memory.shared_base=true")
    assert slots(split) - slots(planned(*KIMI, "memory.shared_base=true")) == 2 * versions * matrices
    sizes = [
        next(part for part in plan.phases[0].parts if part.name == "master weights (float32)").nbytes
        for plan in (shared, without)
    ]
    assert sizes[0] - sizes[1] == 4 * numbers


def test_deepseek_v4_names_its_projections_otherwise() -> None:
    shape = planned("model=deepseek_v4_flash", "hardware=b200x8", GATE_UP, SHARED).model.shape
    (site,) = (site for site in sites(shape, composed(*KIMI, GATE_UP, SHARED).adapter) if site.shared)
    assert (site.inputs, site.linears) == (shape.hidden, shape.layers)


def test_layers_without_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter.expert_targets has 'gate_proj', which layers \[0\] do not have"):
        planned(*KIMI, GATE_UP, SHARED, "adapter.layers=[0]")
    with pytest.raises(ConfigError, match="expert_targets has 'gate_proj'.*no routed experts"):
        planned("model=qwen3_4b", "hardware=h200x1", GATE_UP, SHARED)


def test_it_is_advised_where_an_adapter_of_each_expert_does_not_fit() -> None:
    small = ("model=qwen3_30b_a3b", "hardware=rtx4090x1")
    nearest = nearest_fit(planned(*small, EVERY))
    assert nearest is not None and nearest.plan.fits
    assert nearest.overrides[-2:] == [GATE_UP, SHARED]
    only = nearest_fit(planned(*small, GATE_UP)).overrides
    assert SHARED in only and GATE_UP not in only
    dropped = [one.overrides for one in changes(planned(*small, GATE_UP, SHARED)) if "no adapters on" in one.why]
    assert dropped == [
        ["adapter.expert_width=per_expert", "adapter.expert_targets=[]"]
    ]  # shared would refuse the latter
