"""`orbit sync-test` passes on dense and MoE, and fails with the right cause when something is broken on purpose."""

import json

import pytest


def result(orbit) -> dict:
    return json.loads(next(orbit.root.glob("*/sync_test.json")).read_text())


@pytest.mark.parametrize("recipe", ["smoke_dense_oft", "smoke_moe_lora"])
def test_it_passes(orbit, recipe):
    orbit.run("sync-test", f"recipe={recipe}", "sync.swaps=2")
    found = result(orbit)
    assert found["passed"]
    gaps = [check["gap_mean"] for check in found["checks"] if check["gap_mean"] is not None]
    assert len(gaps) >= 5
    assert max(gaps) < 0.01
    moved = [check["moved"] for check in found["checks"] if check["name"] == "random adapter"]
    assert moved[0] > 1e-3, "an adapter that changes nothing would pass any test"


@pytest.mark.parametrize(
    ("inject", "cause"),
    [
        ("withhold", "is not in the engine"),
        ("wrong_version", "filed it as version"),
        ("alter_base", "the base was altered"),
    ],
)
def test_it_fails_and_names_the_cause(orbit, inject, cause):
    text = orbit.run("sync-test", "recipe=smoke_dense_oft", "sync.swaps=1", f"sync.inject={inject}", code=1)
    assert cause in text
    found = result(orbit)
    assert not found["passed"]
    assert any(cause in failure for failure in found["causes"])
