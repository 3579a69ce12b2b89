"""Results as people read them: tables of eval and sync-test, progress and report of quantize."""

from __future__ import annotations

import pytest

from orbit_cli.commands.quantize_progress import QuantizeProgress, progress_line, report_text
from orbit_cli.commands.tables import evaluation_table, sync_table
from orbit_cli.quantization.convert import Progress, QuantizationReport
from orbit_cli.sync.proof import Check


def test_evaluation_side_by_side() -> None:
    base = {"accuracy": 0.25, "accuracy_low": 0.2, "accuracy_high": 0.3, "pass@4": 0.5, "prompts": 64.0}
    after = {"accuracy": 0.75, "accuracy_low": 0.7, "accuracy_high": 0.8, "prompts": 64.0, "maj@4": float("nan")}
    lines = evaluation_table({"base": {"all": base}, "mine": {"all": after}}).splitlines()
    assert lines[0].split() == ["base", "mine"]
    assert lines[1].split() == ["accuracy", "0.250", "[0.200,", "0.300]", "0.750", "[0.700,", "0.800]"]
    assert [line.split() for line in lines[2:]] == [
        ["pass@4", "0.500", "-"],
        ["prompts", "64", "64"],
        ["maj@4", "-", "-"],
    ]


def test_datasets_are_named_when_there_are_several() -> None:
    table = evaluation_table({"base": {"all": {"accuracy": 0.5}, "sums": {"accuracy": 0.75}}})
    assert "base / all" in table and "base / sums" in table and "0.750" in table


def test_sync_checks_with_their_cause() -> None:
    checks = [
        Check(name="base", passed=True, gap_mean=1e-6, gap_max=2e-6, nbytes=4096, milliseconds=3.2),
        Check(name="swap 1", passed=False, cause="version 2 never took effect"),
    ]
    lines = sync_table(checks).splitlines()
    assert lines[1].split() == ["pass", "base", "1.0e-06", "2.0e-06", "-", "3", "4,096"]
    assert lines[2].startswith("FAIL") and lines[2].endswith("version 2 never took effect")


def progress(done: int) -> Progress:
    return Progress(shard=1, shards=2, tensor="a.b", bytes_done=done << 20, bytes_total=400 << 20, elapsed_s=10.0)


def test_progress_of_quantize(capsys: pytest.CaptureFixture[str]) -> None:
    line = progress_line(progress(100))
    assert line == "shard 1/2  0.10 of 0.39 GiB (25%)  10 MiB/s  ETA 30s  a.b"
    with QuantizeProgress() as shown:
        for done in (100, 101, 102, 400):  # faster than anyone reads: the first and the last are shown
            shown.update(progress(done))
    assert [line.split("(")[1][:3] for line in capsys.readouterr().out.splitlines()] == ["25%", "100"]


def test_report_of_quantize() -> None:
    report = QuantizationReport(
        source="s",
        output="/out",
        format="int4",
        bytes_before=4 << 20,
        bytes_after=1 << 20,
        quantized=2,
        relative_rms=0.1,
        max_abs=0.5,
        kept={"lm_head": "ignored"},
        modules={"a": {"relative_rms": 0.1, "max_abs": 0.5}, "b": {"relative_rms": 0.2, "max_abs": 0.4}},
    )
    text = report_text(report)
    assert "int4: 2 linears encoded, 0 copied byte for byte, 1 kept in bfloat16" in text
    assert "4.0 -> 1.0 MiB" in text and "lm_head: ignored" in text
    assert text.index("worst    b") < text.index("worst    a")
    assert text.endswith("wrote    /out")


def test_a_copy_is_not_reported_as_a_conversion_of_nothing() -> None:
    report = QuantizationReport(source="s", output="out", format="bf16")
    assert report_text(report) == "bf16: every tensor is copied as it is, nothing is encoded\nwrote    out"
