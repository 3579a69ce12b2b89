"""The published memory study is reproduced, and what it leaves out is said."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from planning import model_of, planned

from orbit_cli.planner.study import FROZEN, RECIPES, Row, recipe_bytes, rounded, study
from orbit_cli.planner.study_plot import plot


@pytest.fixture(scope="module")
def counted() -> list[Row]:
    return study()


def test_the_four_recipes_over_model_size(counted: list[Row]) -> None:
    rows = {row.name: row for row in counted}
    kimi = rows["kimi_k26"]
    assert {name: f"{nbytes / 1e9:.0f}" for name, nbytes in kimi.recipe_bytes.items()} == {
        "BF16 + BF16": "4120",
        "FP8 + BF16": "3090",
        "FP8 + FP8": "2060",
        FROZEN: "528",
    }
    assert f"{kimi.adapter_bits:.4f}" == "0.0516"
    assert f"{kimi.adapter_parameters / 1e9:.3f}" == "3.310"
    assert f"{kimi.base_bytes / 1e9:.2f}" == "595.15"  # the real base, which 4.0 bit for everything is not
    assert f"{kimi.base_and_adapter_bytes / 1e9:.0f}" == "608"
    sizes = [row.parameters for row in counted]
    assert sizes == sorted(sizes)
    assert all(list(row.recipe_bytes) == [*RECIPES, FROZEN] for row in rows.values())


def test_what_the_published_figures_imply() -> None:
    """0.04 bit per parameter would be 525.3 GB; rotations of their own for gate and up 0.0916 bit, or 539 GB."""
    n = rounded(model_of("kimi_k26").shape.parameters)
    assert f"{recipe_bytes(n, 4.04, 0.04) / 1e9:.1f}" == "525.3"
    own = planned("model=kimi_k26", "adapter.expert_targets=[gate_proj,up_proj,down_proj]").adapter_parameters
    bits = 16 * own / model_of("kimi_k26").shape.parameters
    assert f"{bits:.4f}" == "0.0916"
    assert f"{recipe_bytes(n, 4 + bits, bits) / 1e9:.0f}" == "539"


def test_the_plot_has_every_model_and_recipe_in_all_formats(counted: list[Row]) -> None:
    assert plot(counted, "png").startswith(b"\x89PNG") and plot(counted, "pdf").startswith(b"%PDF")
    content = plot(counted, "svg")
    assert content == plot(counted, "svg")
    root = ElementTree.fromstring(content)
    labels = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    for word in (*RECIPES, FROZEN, *(row.name for row in counted), "b200x8"):
        assert word in labels
