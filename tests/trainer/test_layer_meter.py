"""What a layer costs: all layers and their experts are seen, bytes are those autograd holds, nothing is moved."""

from dataclasses import replace

import pytest
import torch

from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.compose import compose
from orbit_cli.models.build import build_model
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.trainer.layer_meter import MEASURED_STEPS, LayerMeter

TOKENS = 24


@pytest.fixture(scope="module")
def moe_base(tmp_path_factory):
    config = compose(["model=tiny_moe", f"quantization.cache_dir={tmp_path_factory.mktemp('bases')}"])
    return config, prepare_base(config.model, config.quantization, lambda text: None)


def moe_model(moe_base):
    config, base = moe_base
    projections = ["gate_proj", "up_proj", "down_proj"]
    adapter = replace(config.adapter, block_size=16, targets=["q_proj", "o_proj"], expert_targets=projections)
    spec = spec_from_config(adapter)
    return build_model(base, spec, layers=[], device="cpu", dtype=torch.float32, seed=0)


def run(model, meter=None):
    """One forward and backward of a sequence; the gradient of the master."""
    ids = torch.randint(0, 200, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    mask[:, TOKENS // 2 :] = True
    model.bank.zero_grad()

    def step():
        logprobs, _ = model.logprobs(ids, torch.tensor([TOKENS]), mask, temperature=1.0, chunk=8)
        logprobs.sum().backward()

    if meter is None:
        step()
    else:
        with meter.step():
            step()
    model.bank.pull_back()
    return [parameter.grad.clone() for parameter in model.bank.parameters()]


def test_every_layer_and_its_experts_are_measured_and_gradients_stay_bit_for_bit(moe_base):
    model = moe_model(moe_base)
    plain = run(model)
    meter = LayerMeter(model)
    for _ in range(MEASURED_STEPS):
        assert meter.record is None
        watched = run(model, meter)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert meter.record["tokens"] == TOKENS - 1
    assert len(meter.record["layers"]) == model.module.config.num_hidden_layers
    for row in meter.record["layers"]:
        assert set(row) == {
            f"{part}{x}" for part in ("", "experts_") for x in ("forward_ms", "backward_ms", "kept_mib")
        }
        assert 0 < row["experts_forward_ms"] < row["forward_ms"]
        assert 0 < row["experts_backward_ms"] < row["backward_ms"]
        assert 0 < row["experts_kept_mib"] < row["kept_mib"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules()), "hooks were left behind"


def test_a_short_run_has_a_record_too(moe_base):
    model = moe_model(moe_base)
    meter = LayerMeter(model)
    run(model, meter)
    assert meter.record is None
    meter.finish()
    assert len(meter.record["layers"]) == model.module.config.num_hidden_layers


def test_a_step_without_gradient_is_not_measured(moe_base):
    model = moe_model(moe_base)
    meter = LayerMeter(model)
    for _ in range(MEASURED_STEPS):
        with meter.step():
            pass
    assert meter.record is None


def test_bytes_kept_are_those_of_the_saved_tensors(moe_base):
    """Against another count: distinct storages that autograd saves in the whole decoder, but for base and adapter."""
    model = moe_model(moe_base)
    held = {tensor.untyped_storage().data_ptr() for tensor in model.held()}
    saved = {}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor.detach())
        return tensor.detach()

    ids = torch.randint(0, 200, (1, TOKENS - 1), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model.module.model(input_ids=ids, use_cache=False)
    meter = LayerMeter(model)
    for _ in range(MEASURED_STEPS):
        run(model, meter)
    kept = sum(row["kept_mib"] for row in meter.record["layers"])
    whole = sum(size for size, _ in saved.values()) / 2**20
    assert 0.9 * whole < kept < 1.1 * whole  # the last norm is no layer; a tensor between two layers counts in both


def test_recomputation_keeps_the_input_alone(moe_base):
    model = moe_model(moe_base)
    model.enable_checkpointing()
    meter = LayerMeter(model)
    for _ in range(MEASURED_STEPS):
        run(model, meter)
    hidden = model.module.config.hidden_size
    for row in meter.record["layers"]:
        assert row["kept_mib"] * 2**20 == (TOKENS - 1) * hidden * 4
        assert row["experts_kept_mib"] == 0
        assert row["backward_ms"] > 0
