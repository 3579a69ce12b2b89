"""A real tiny model on a real quantised base, for the trainer's own tests (no engine)."""

from dataclasses import replace

import pytest
import torch

from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.compose import compose
from orbit_cli.config.schema.learning import Schedule, TrainerConfig
from orbit_cli.models.build import build_model
from orbit_cli.quantization.base_model import prepare_base


@pytest.fixture
def trainer_config():
    def make(**fields):
        fields["schedule"] = Schedule(fields.get("schedule", "constant"))
        return TrainerConfig(**fields)

    return make


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    """(config, folder) of the tiny dense INT4 model."""
    cache = tmp_path_factory.mktemp("bases")
    config = compose(["model=tiny_dense", f"quantization.cache_dir={cache}"])
    return config, prepare_base(config.model, config.quantization, lambda text: None)


@pytest.fixture
def make_model(tiny_base):
    """A fresh trainer model; the adapter starts away from the identity, so that every gradient path is alive."""

    def make(adapter=None, scale=0.02):
        config, base = tiny_base
        adapter = adapter or replace(config.adapter, block_size=16)
        model = build_model(base, spec_from_config(adapter), layers=[], device="cpu", dtype=torch.float64, seed=0)
        model.bank.randomize(seed=3, scale=scale)
        model.bank.materialize()
        return model

    return make
