"""The benchmark's own arithmetic on a CPU: its plan, its rows, and tables that say what the rows say."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orbit_kernels import bench, bench_sglang
from orbit_kernels.bench_paths import Batch, Problem
from orbit_kernels.bench_plan import DECODING_TOKENS, RECORD, SHAPES, TOKENS, Case, chosen, everything
from orbit_kernels.bench_tables import tables
from orbit_kernels.grouped import PackedExperts


def row(path: str, pass_: str, ms: float, tokens: int = 4096, graph: bool = False, **more) -> dict:
    return {
        "shape": "v4-flash", "format": "int4", "tokens": tokens, "path": path, "pass": pass_, "ms": ms,
        "ratio_bf16": ms / 4, "tflops": 400.0, "bandwidth_share": 0.25, "transient_bytes": 6144, "graph": graph,
    } | more  # fmt: skip


def test_the_record_is_part_of_everything():
    every = {(c.shape, c.format, c.decoding, tokens) for c in everything() for tokens in c.tokens}
    assert {(c.shape, c.format, c.decoding, tokens) for c in RECORD for tokens in c.tokens} <= every
    assert all(case.shape in SHAPES for case in RECORD)


def test_chosen_sizes_are_taken_as_they_are():
    (case,) = chosen(("v4-pro",), ("fp8",), (3,))
    assert case.tokens == (3,) and case.whole and not case.decoding
    assert [c.decoding for c in chosen(("v4-pro",), ("int4",), DECODING_TOKENS, True)] == [True]
    assert TOKENS == (1024, 4096, 16384, 65536)


def test_product_table():
    found = tables({"rows": [
        row("bf16 resident", "forward", 4.0), row("bf16 resident", "gradient", 6.0),
        row("kernels", "forward", 2.0), row("kernels", "gradient", 3.0, tflops=500.0, bandwidth_share=0.5),
    ]})  # fmt: skip
    assert (
        found.splitlines()[2] == "| V4-Flash, INT4 | 4,096 | 4.00 + 6.00 | 2.00 | 3.00 | 0.50 | 460 | 40% | 6.0 KiB |"
    )


def test_decoding_and_prefill_tables_do_not_mix():
    found = tables({"rows": [
        row("kernels", "mlp", 0.5, graph=True), row("sglang marlin", "mlp", 0.25, graph=True),
        row("kernels", "mlp", 8.0), row("sglang marlin", "mlp", 16.0), row("sglang triton", "mlp", 20.0),
    ]})  # fmt: skip
    prefill, decoding = found.split("\n\n")
    assert prefill.splitlines()[2] == "| V4-Flash, INT4 | 4,096 | 8.00 | 16.0 | 20.0 | 0.50 |"
    assert decoding.splitlines()[2:] == [
        "| V4-Flash, INT4 | MLP: ours | 500 |",
        "| | MLP: Marlin | 250 |",
        "| | MLP: ours / Marlin | 2.00 |",
    ]


def test_layer_table_names_both_ratios():
    rows = [row("kernels", "forward", 2.0), row("kernels", "products", 4.0)]
    found = tables({"rows": [*rows, row("layer none", "layer", 5.0), row("layer oft32", "layer", 6.0)]})
    assert "| none | 5.00, 1.25 (1.25) |\n| OFT, block 32 | 6.00, 1.50 (1.50) |" in found
    assert found.endswith("| the products alone | 4.00 (1.00) |")


@pytest.mark.parametrize("name", ["moe_h200.json"])
def test_the_document_says_what_the_data_say(name: str):
    folder = Path(__file__).resolve().parents[2] / "docs"
    text = (folder / "benchmarks.md").read_text()
    for table in tables(json.loads((folder / "benchmarks" / name).read_text())).split("\n\n"):
        assert table in text


def small_problem() -> tuple[Problem, Batch]:
    """4 experts of hidden 64 and intermediate 32 in INT4, of which 3 have rows."""
    packed = [torch.zeros(4, 64, 32, dtype=torch.uint8), torch.zeros(4, 64, 16, dtype=torch.uint8)]
    scales = [torch.zeros(4, 64, 2, dtype=torch.bfloat16), torch.zeros(4, 64, 1, dtype=torch.bfloat16)]
    w13, w2 = (PackedExperts(packed=p, scale=s, fmt="int4") for p, s in zip(packed, scales, strict=True))
    dense = [torch.zeros(4, 64, columns, dtype=torch.bfloat16) for columns in (64, 32)]
    half = torch.bfloat16
    shapes = ((5, 64), (10, 64), (10, 32), (10, 64), (10, 64))
    x, rows13, rows2, slopes13, slopes2 = (torch.zeros(shape, dtype=half) for shape in shapes)
    nothing = torch.zeros(0)
    return Problem(w13, w2, *dense, 2), Batch(x, nothing, nothing, nothing, 3, rows13, rows2, slopes13, slopes2)


def test_bytes_that_must_move():
    problem, batch = small_problem()
    packed, dense = 3 * 64 * (32 + 4 + 16 + 2), 3 * 64 * (64 + 32) * 2
    rows = 2 * 10 * (64 + 32 + 64 + 64)
    assert problem.bytes_moved(batch, "forward", False) == packed + rows
    assert problem.bytes_moved(batch, "gradient", True) == dense + rows
    assert problem.bytes_moved(batch, "mlp", False) == packed + 2 * 5 * 64 * 2
    assert problem.bytes_moved(batch, "layer", False) == 2 * packed + 4 * 5 * 64 * 2


def test_a_row_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200"))
    problem, batch = small_problem()
    run = bench.Run(tmp_path / "moe.json", {"gpu": "x"}, [], ["nothing"], time.monotonic())
    case = Case(shape="v4-flash", format="int4", tokens=(5,))
    run.add(case, problem, batch, "kernels", "forward", 0.5, 2.0, 7)
    run.write()
    data = json.loads(run.out.read_text())
    assert data["about"] == {"gpu": "x"} and data["left_out"] == ["nothing"]
    (found,) = data["rows"]
    assert found["ratio_bf16"] == 0.25 and found["transient_bytes"] == 7 and found["graph"] is False
    assert found["tflops"] == round(6 * 5 * 6 * 4096 * 2048 / 0.5e-3 / 1e12, 1)


def test_without_sglang_its_rows_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_sglang, "version", lambda: None)
    assert bench_sglang.prepare() == "SGLang is not installed"
