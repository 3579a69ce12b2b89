"""The figures of a run against hand-made rows, the page, and the recorder that makes both."""

from __future__ import annotations

import io
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.config.schema.system import ConsoleMode
from orbit_cli.errors import UserError
from orbit_cli.telemetry.charts import Series, line_chart, stacked_bars, ticks
from orbit_cli.telemetry.console import RunConsole, duration
from orbit_cli.telemetry.metrics import read_rows
from orbit_cli.telemetry.receipts import AdaptedRow, Receipts, receipts
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.report import figures, summary_text, write_report
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.types import EvalResult, FinishReason, Trajectory

CONTRACT = {
    "reward_first_fifth",
    "reward_last_fifth",
    "eval_before",
    "eval_after",
    "logprob_gap_mean",
    "logprob_gap_max_step",
    "steps",
}


def trajectory(index: int) -> Trajectory:
    return Trajectory(
        prompt_id=f"sum/{index}",
        group=index // 4,
        sample=index % 4,
        token_ids=[5, 6, 7],
        policy_mask=[False, True, True],
        logprobs=[0.0, -0.1, -0.2],
        versions=[None, 1, 1],
        reward=None if index == 3 else float(index % 2),
        reward_parts={"exact": float(index % 2)},
        finish_reason=FinishReason.stop,
        text=f"<script>alert({index})</script>",
        correct=bool(index % 2),
        prompt_text="5 + 7 = ?",
        reference="12",
    )


def evaluation(accuracy: float) -> EvalResult:
    low, high = accuracy - 0.05, accuracy + 0.05
    figures_ = {"accuracy": accuracy, "accuracy_low": low, "accuracy_high": high, "pass@1": accuracy, "pass@4": 0.9}
    return EvalResult(metrics=figures_, trajectories=[])


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunFolder, list[dict[str, float]]]:
    """A run of 11 steps with random figures, and these figures."""
    config = compose([f"run.root={tmp_path}", "trainer.steps=11", "logging.console=plain"])
    folder = RunFolder.create(config)
    rows = [
        {
            "reward_mean": random.random(),
            "logprob_gap_mean": random.random() / 1000,
            "rollout_tokens": float(random.randint(100, 900)),
            "prompt_tokens": 1000.0,
            "computed_tokens": float(random.randint(1000, 2000)),
            "swap_bytes": 1e6 + step,
            "swap_milliseconds": random.random(),
            "grading_failures": 1.0,
            "truncated_share": random.random(),
            "groups": 8.0,
            "groups_informative": float(step % 4),
            "groups_discarded": 2.0,
            "sampling_rounds": 2.0,
        }
        for step in range(11)
    ]
    with folder.running(), Recorder(folder, config) as recorder:
        recorder.open(0)
        adapted = AdaptedRow(name="q_proj", modules=20, shape="4 x 4", parameters=120)
        recorder.receipts([adapted], [("base files", "tiny & small")])
        recorder.record("sync", 0, {"swap_bytes": 5.0})
        recorder.evaluation(0, evaluation(0.25))
        for step, row in enumerate(rows, start=1):
            with recorder.phase("rollout"):
                recorder.turn(8)
            with recorder.phase("train"):
                sum(range(1000))
            with recorder.phase("sync"):
                pass
            recorder.step(step, row, [trajectory(index) for index in range(8)])
        recorder.evaluation(11, evaluation(0.75))
        assert recorder.evaluated(11) and not recorder.evaluated(5)
        for version in (2, 11):
            folder.adapter(version).mkdir()
            (folder.adapter(version) / "adapter_config.json").write_text("{}")
        folder.adapter(12).mkdir()  # not complete
        write_report(folder.path)
    return folder, rows


def test_figures_against_the_rows(run: tuple[RunFolder, list[dict[str, float]]]) -> None:
    folder, rows = run
    found = figures(folder.path)
    assert set(found) >= CONTRACT
    assert found["steps"] == 11
    assert found["status"] == "finished"
    assert found["reward_first_fifth"] == pytest.approx(fmean(row["reward_mean"] for row in rows[:2]))
    assert found["reward_last_fifth"] == pytest.approx(fmean(row["reward_mean"] for row in rows[-2:]))
    gaps = [row["logprob_gap_mean"] for row in rows]
    assert found["logprob_gap_mean"] == pytest.approx(fmean(gaps))
    assert found["logprob_gap_max_step"] == max(gaps)
    assert found["swap_bytes"] == sorted(row["swap_bytes"] for row in rows)[5]
    assert found["eval_before"]["accuracy"] == 0.25 and found["eval_after"]["accuracy"] == 0.75
    assert found["eval_after"]["low"] == pytest.approx(0.7) and found["eval_after"]["pass@4"] == 0.9
    assert found["grading_failures"] == 11
    assert found["groups_informative_share"] == pytest.approx(sum(step % 4 for step in range(11)) / (11 * 10))
    assert found["groups_discarded"] == 22 and found["sampling_rounds"] == 2.0
    train = [row for row in read_rows(folder.metrics) if row["kind"] == "train"]
    assert found["phase_seconds"]["sync"] == pytest.approx(fmean(row["sync_seconds"] for row in train))
    assert sum(found["phase_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert found["truncated_first_fifth"] == pytest.approx(fmean(row["truncated_share"] for row in rows[:2]))
    assert found["truncated_last_fifth"] == pytest.approx(fmean(row["truncated_share"] for row in rows[-2:]))
    seconds = [row["rollout_seconds"] for row in read_rows(folder.metrics) if row["kind"] == "train"]
    assert found["tokens_per_second"] == pytest.approx(sum(row["rollout_tokens"] for row in rows) / sum(seconds))
    seconds = [row["train_seconds"] for row in read_rows(folder.metrics) if row["kind"] == "train"]
    assert found["train_tokens_per_second"] == pytest.approx(sum(r["computed_tokens"] for r in rows) / sum(seconds))
    assert found["adapter"] == str(folder.adapter(11))
    assert json.loads(folder.summary.read_text())["steps"] == 11


def test_the_rows_know_their_time(run: tuple[RunFolder, list[dict[str, float]]]) -> None:
    train = [row for row in read_rows(run[0].metrics) if row["kind"] == "train"]
    for row in train:
        parts = row["rollout_seconds"] + row["train_seconds"] + row["sync_seconds"]
        assert row["step_seconds"] == pytest.approx(parts) and parts > 0
        assert row["rss_gib"] > 0.01


def test_summary_text_says_what_came_out(run: tuple[RunFolder, list[dict[str, float]]]) -> None:
    text = summary_text(figures(run[0].path))
    for word in ("0.250 [0.200, 0.300] -> 0.750", "pass@1", "pass@4", "log-prob gap", "MiB in", "tokens/s", "report"):
        assert word in text
    assert re.search(r"s per step \(rollout [\d.]+, train [\d.]+, sync [\d.]+\)", text)
    assert re.search(r"truncated +\d+% -> \d+% of the responses ended at rollout.max_new_tokens", text)
    assert f"orbit eval run.adapter={run[0].path}" in text


def test_a_run_without_a_difference_in_reward_is_said_to_have_learned_nothing(tmp_path: Path) -> None:
    config = compose([f"run.root={tmp_path}", "trainer.steps=2", "logging.console=plain"])
    folder = RunFolder.create(config)
    row = {"reward_mean": 0.125, "groups": 4.0, "groups_informative": 0.0, "trained_samples": 0.0}
    with folder.running(), Recorder(folder, config) as recorder:
        recorder.open(0)
        for step in (1, 2):
            recorder.step(step, row, [trajectory(0)])
    found = figures(folder.path)
    assert found["groups_informative_share"] == 0.0
    said = summary_text(found)
    assert re.search(
        r"learned +nothing from the rewards: .*\(mean reward 0\.125\); look at environment .*max_new_tokens", said
    )
    assert "groups        0% of the groups had samples of unequal reward" in said
    assert "groups to learn from" in write_report(folder.path).read_text()
    for other in ({"groups_informative_share": 0.25}, {"trained_samples": 3}, {"groups_informative_share": None}):
        assert "nothing from the rewards" not in summary_text(found | other)


class Page(HTMLParser):
    """Collects tags and attributes; unbalanced ones fail."""

    VOID = {"meta", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [value for name, value in attributes if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_outside(run: tuple[RunFolder, list[dict[str, float]]]) -> None:
    text = run[0].report.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.outside == [] and "script" not in page.tags
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)
    assert page.tags.count("svg") >= 6
    for title in ("Reward", "Held-out accuracy", "pass@k", "log-prob gap", "Memory", "Samples", "Receipts"):
        assert title in text
    assert "&lt;script&gt;alert(" in text  # what a model writes is text
    assert "tiny &amp; small" in text and "expected 12" in text
    assert "prefers-color-scheme: dark" in text


def test_memory_and_layers_are_told_in_words(run: tuple[RunFolder, list[dict[str, float]]]) -> None:
    folder, _ = run
    pair = {"planned_gib": 3.0, "measured_gib": 2.5, "off_percent": 20.0}
    record = {
        "process_gib_is": "peak in the phase",
        "phases": {"train": {"process_gib": 2.5, "cuda0_used_gib": 8.0}, "rollout": {"process_gib": 1.0}},
        "planned": {"train": {"process_gib": pair}},
        "parts": {"base_packed": {"planned_gib": 0.5, "measured_gib": 0.5, "off_percent": 0.0}},
    }
    folder.memory.write_text(json.dumps(record))
    row = {"forward_ms": 2.0, "backward_ms": 4.0, "kept_mib": 8.0}
    routed = row | {"experts_forward_ms": 1.25, "experts_backward_ms": 3.0, "experts_kept_mib": 6.0}
    dense = row | {"forward_ms": 7.0}
    folder.layers.write_text(json.dumps({"about": "a step", "tokens": 64, "layers": [dense, routed, routed]}))
    found = figures(folder.path)
    assert found["memory_gib"] == {"process_gib": 2.5, "cuda0_used_gib": 8.0}
    assert found["memory_planned_gib"] == {"process_gib": 3.0}
    assert "trainer 2.50 (planned 3.00); GPU 0, all that is in use 8.00" in summary_text(found)
    page = write_report(folder.path).read_text()
    assert "512.0 MiB" in page and "held by the trainer: base packed" in page
    assert "<th>layers with routed experts (2)</th><td>2.0</td><td>4.0</td><td>8.0</td>" in page
    assert "<th>of these, the experts</th><td>1.2</td><td>3.0</td><td>6.0</td>" in page
    assert "<th>layers without such experts (1)</th><td>7.0</td>" in page


def test_a_run_that_has_just_begun_has_a_page_too(tmp_path: Path) -> None:
    folder = RunFolder.create(compose([f"run.root={tmp_path}"]))
    found = figures(folder.path)
    assert found["steps"] == 0 and found["eval_before"] is None
    assert write_report(folder.path).is_file()
    assert summary_text(found)


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(compose([f"run.root={tmp_path}"]))
    status = folder.path / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"pid": 2**22 + 1}))  # above Linux's largest pid
    assert figures(folder.path)["status"] == "killed"
    with pytest.raises(UserError):
        figures(tmp_path / "none")


def test_charts_put_numbers_where_they_belong() -> None:
    svg = line_chart("Reward", [Series(name="r", x=[0.0, 10.0], y=[0.0, 1.0])], floor=0.0)
    figure = ElementTree.fromstring(svg)
    (line,) = figure.iter("polyline")
    (x0, y0), (x1, y1) = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    assert x0 < x1 and y0 > y1  # time goes right, more goes up
    assert line_chart("empty", [Series(name="r", x=[], y=[])]) == ""
    bars = ElementTree.fromstring(stacked_bars("t", [1.0, 2.0], {"a": [1.0, 2.0], "b": [3.0, 1.0]}, unit="s"))
    heights = [float(bar.get("height")) for bar in bars.iter("rect")]
    assert heights[2] == pytest.approx(3 * heights[0], rel=0.01)


@pytest.mark.parametrize("span", [(0.0, 1.0), (0.0, 1e-6), (-3.0, 7.0), (0.0, 12345.0), (0.999, 1.0)])
def test_ticks_cover_the_range_with_round_numbers(span: tuple[float, float]) -> None:
    found = ticks(*span)
    assert found[0] <= span[0] + 1e-12 and found[-1] >= span[1] - 1e-12
    assert 2 <= len(found) <= 9


def test_the_console_is_plain_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with RunConsole(ConsoleMode.auto, 4, stream=out) as console:
        console.receipts(["adapted tensors [x]"])
        console.start()
        console.row({"kind": "train", "step": 1, "reward_mean": 0.5, "loss": None, "step_seconds": 30.0})
        console.row(
            {"kind": "eval", "step": 4, "accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "pass@1": 0.5}
        )
        console.note("[not markup] /a/path")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "adapted tensors [x]"
    assert any(line.startswith("step   1/4") and "ETA 1m30s" in line and "loss -" in line for line in lines)
    assert any("accuracy 0.500  [0.400, 0.600]  pass@1 0.500" in line for line in lines)
    assert "[not markup] /a/path" in lines


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59, 61, 3600, 7500)] == ["0s", "59s", "1m01s", "1h00m", "2h05m"]


def test_a_terminal_gets_a_live_table() -> None:
    out = io.StringIO()
    with RunConsole(ConsoleMode.rich, 2, stream=out) as console:
        console.start()
        console.phase("rollout")
        console.row({"kind": "train", "step": 1, "reward_mean": 0.5})
    assert "0.500" in out.getvalue()


def test_receipts_count_the_batch(tmp_path: Path) -> None:
    batch = ["rollout.prompts_per_step=6", "rollout.group_size=5", "rollout.max_new_tokens=7"]
    config = compose([*batch, "algorithm=dr_grpo"])
    rows = [AdaptedRow(name=name, modules=30, shape="576 x 576", parameters=617) for name in ("q_proj", "o_proj")]
    made = receipts(config, run=tmp_path, adapted=rows, facts=[("base files", "sha256 abc")])
    text = "\n".join(made.lines())
    assert "6 prompts x 5 samples = 30" in text and "30 x 7 = 210 new" in text
    assert "constant: samples of the optimiser step x 7" in text and "per round" not in text
    dynamic = receipts(compose([*batch, "algorithm=dapo"]), run=tmp_path, adapted=rows, facts=[])
    assert "30 x 7 = 210 new per round, up to 4 rounds (dynamic sampling)" in "\n".join(dynamic.lines())
    assert "adapted tensors (1,234 parameters)" in text and "sha256 abc" in text
    made.save(tmp_path / "receipts.json")
    assert Receipts.load(tmp_path / "receipts.json") == made
    assert Receipts.load(tmp_path / "none.json") is None
