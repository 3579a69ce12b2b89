"""`orbit sync-test` passes on dense and MoE, and fails with the right cause when something is broken on purpose."""

import json

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.config.schema.system import Inject
from orbit_cli.quantization.identity import base_checksum
from orbit_cli.runs.assembly import probe_tokens, serving
from orbit_cli.sync.proof import Proof


@pytest.fixture(scope="module")
def served(bases, tmp_path_factory):
    """The dense smoke recipe's engine and trainer."""
    config = compose(["recipe=smoke_dense_oft", bases, "hardware.threads=1", "sync.swaps=1"])
    log = tmp_path_factory.mktemp("sync") / "engine.log"
    with serving(config, log, print, with_trainer=True) as parts:
        yield config, parts


def prove(served, inject: Inject):
    config, parts = served
    tokens, checksum = probe_tokens(config, parts), base_checksum(parts.base)
    return Proof(parts.engine, parts.model, tokens, config.sync, inject).run(checksum, checksum)


def test_dense_passes_and_its_adapters_act(served):
    checks = prove(served, Inject.none)
    assert [check.cause for check in checks if not check.passed] == []
    gaps = [check.gap_mean for check in checks if check.gap_mean is not None]
    assert len(gaps) >= 4
    assert max(gaps) < 0.01
    moved = [check.moved for check in checks if check.name == "random adapter"]
    assert moved[0] > 1e-3, "an adapter that changes nothing would pass any test"


@pytest.mark.parametrize(
    ("inject", "cause"),
    [(Inject.withhold, "is not in the engine"), (Inject.wrong_version, "filed it as version")],
)
def test_a_broken_delivery_is_named(served, inject, cause):
    failed = [check.cause for check in prove(served, inject) if not check.passed]
    assert failed
    assert cause in failed[0]


def result(orbit) -> dict:
    return json.loads(next(orbit.root.glob("*/sync_test.json")).read_text())


def test_the_command_passes_on_a_moe(orbit):
    orbit.run("sync-test", "recipe=smoke_moe_lora", "sync.swaps=2")
    found = result(orbit)
    assert found["passed"]
    assert max(check["gap_mean"] for check in found["checks"] if check["gap_mean"] is not None) < 0.01


def test_the_command_fails_on_an_altered_base(orbit):
    cause = "the base was altered"
    text = orbit.run("sync-test", "recipe=smoke_dense_oft", "sync.swaps=1", "sync.inject=alter_base", code=1)
    assert cause in text
    found = result(orbit)
    assert not found["passed"]
    assert any(cause in failure for failure in found["causes"])
