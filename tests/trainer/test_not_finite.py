"""An adapter or a gradient that is no number any more is found by the trainer, before anything is published."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from orbit_cli.config.compose import compose
from orbit_cli.errors import NotFiniteError
from orbit_cli.sync.parity import Probes, tolerance
from orbit_cli.sync.publisher import Publisher
from orbit_cli.trainer.loop import finite
from orbit_cli.trainer.step import _clip


class Engine:
    """Takes no adapter: whatever is published fails the test."""

    def base_checksum(self) -> str:
        return "same"


def session(model) -> SimpleNamespace:
    config = compose(["trainer.learning_rate=1e17"])
    publisher = Publisher(Probes(Engine(), model, [], tolerance(config)), config.sync)
    return SimpleNamespace(config=config, model=model, publisher=publisher)


def test_an_adapter_with_infinite_values_is_not_published(make_model) -> None:
    broken = session(make_model())
    for parameter in broken.model.bank.parameters():
        parameter.data.fill_(1e17)  # finite, and the rotations made of it are not
    with pytest.raises(NotFiniteError) as caught, finite(broken, 3):
        broken.publisher.publish(3)
    sentence = str(caught.value)
    assert sentence.startswith("step 3 of training cannot go on: ") and "\n" not in sentence
    assert "has NaN or infinite values; it was not published; the adapter's norm is " in sentence
    assert "trainer.learning_rate=1e+17 is the likely cause: set a lower one, for example 0.0001" in sentence


def test_a_gradient_that_is_no_number(make_model) -> None:
    broken = session(make_model())
    for parameter in broken.model.bank.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(NotFiniteError, match="the gradient norm is nan; the adapter's norm"), finite(broken, 1):
        _clip(broken.model, 1.0)
