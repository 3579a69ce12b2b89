"""report.html: one self-contained page about a run, without scripts, fonts or anything else from outside."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from orbit_cli.telemetry.charts import Series, line_chart, number, stacked_bars
from orbit_cli.telemetry.files import intact, read_json
from orbit_cli.telemetry.memory import column_words
from orbit_cli.telemetry.metrics import read_rows
from orbit_cli.telemetry.receipts import Receipts
from orbit_cli.telemetry.report import summary_text
from orbit_cli.telemetry.run_folder import RunFolder

SAMPLES_SHOWN = 12

STYLE = Path(__file__).with_name("report.css")


def page(folder: RunFolder, figures: dict[str, Any]) -> str:
    """The HTML of a run, from its folder and its `figures`."""
    rows = read_rows(folder.metrics)
    title = escape(folder.path.name)
    body = "".join(
        [
            f"<h1>{title}</h1>",
            f"<p class='sub'>{escape(str(folder.path))} · {figures['status']} · {figures['steps']} steps</p>",
            f"<p>failed with {escape(figures['error'])}</p>" if figures["error"] else "",
            _tiles(figures),
            _section("Curves", f"<div class='charts'>{''.join(_charts(rows))}</div>" if rows else ""),
            _section("Memory", _read(folder.memory, _memory, folder)),
            _section("Layers", _read(folder.layers, _layers, folder)),
            _section("Samples to read", _read(folder.samples, _samples, folder)),
            _section("Receipts", _receipts(folder)),
            _section(
                "Figures", f"<details><summary>as text</summary><pre>{escape(summary_text(figures))}</pre></details>"
            ),
            _section(
                "Config",
                f"<details><summary>config.yaml</summary><pre>{escape(folder.config.read_text())}</pre></details>",
            ),
        ]
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width,"
        f"initial-scale=1'><meta name='color-scheme' content='light dark'><title>{title} · Orbit</title>"
        f"<style>{STYLE.read_text()}</style></head><body><main>{body}</main></body></html>\n"
    )


def _read(path: Path, make: Callable[[RunFolder], str], folder: RunFolder) -> str:
    with intact(path):
        return make(folder)


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>{content}" if content else ""


def _tiles(f: dict[str, Any]) -> str:
    before, after = f["eval_before"] or {}, f["eval_after"] or {}
    tiles = [
        _tile("reward, first to last fifth", f["reward_first_fifth"], f["reward_last_fifth"]),
        _fact("groups to learn from", f["groups_informative_share"], "share whose samples differ in reward"),
        _tile("held-out accuracy", before.get("accuracy"), after.get("accuracy"), _interval(after or before)),
        _tile("pass@1", before.get("pass@1"), after.get("pass@1")),
        _tile("pass@4", before.get("pass@4"), after.get("pass@4")),
        _fact("mean |log-prob gap|", f["logprob_gap_mean"], "nats, trainer against engine"),
        _fact("sampled tokens per second", f["tokens_per_second"], "of rollout time"),
        _fact(
            "adapter swap",
            f["swap_milliseconds"],
            f"ms for {number(f['swap_bytes'] / 2**20)} MiB" if f["swap_bytes"] else "",
        ),
        _fact("step", f["step_seconds"], "s on average"),
    ]
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _interval(row: dict[str, Any]) -> str:
    return f"95% [{row['low']:.3f}, {row['high']:.3f}]" if row.get("low") is not None else ""


def _tile(label: str, before: float | None, after: float | None, note: str = "") -> str:
    if before is None:
        return ""
    if after is None:
        return f"<div class='tile'><span>{label}</span><b>{before:.3f}</b><span>{note}</span></div>"
    tone = "good" if after > before else "bad" if after < before else ""
    return (
        f"<div class='tile'><span>{label}</span><b>{before:.3f} → <span class='{tone}' style='font-size:inherit'>"
        f"{after:.3f}</span></b><span>{note}</span></div>"
    )


def _fact(label: str, value: float | None, note: str) -> str:
    return (
        ""
        if value is None
        else f"<div class='tile'><span>{label}</span><b>{number(value)}</b><span>{note}</span></div>"
    )


def _series(rows: list[dict[str, Any]], metric: str, name: str = "") -> Series:
    have = [row for row in rows if row.get(metric) is not None]
    bounds = [(row.get(f"{metric}_low"), row.get(f"{metric}_high")) for row in have]
    whole = bool(have) and all(low is not None and high is not None for low, high in bounds)
    return Series(
        name=name or metric,
        x=[row["step"] for row in have],
        y=[row[metric] for row in have],
        low=[low for low, _ in bounds] if whole else [],
        high=[high for _, high in bounds] if whole else [],
    )


def _charts(rows: list[dict[str, Any]]) -> list[str]:
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    passes = sorted({name for row in evals for name in row if name.startswith("pass@") and "_" not in name})
    steps = [row["step"] for row in train]
    split = {phase: [row.get(f"{phase}_seconds") or 0.0 for row in train] for phase in ("rollout", "train", "sync")}
    gap = [_series(train, "logprob_gap_mean", "batch"), _series(train, "probe_gap_mean", "probes")]
    return [
        line_chart("Reward", [_series(train, "reward_mean")], floor=0.0),
        line_chart("Held-out accuracy, 95% interval", [_series(evals, "accuracy")], floor=0.0),
        line_chart("pass@k, held out", [_series(evals, name) for name in passes], floor=0.0),
        line_chart("Mean |log-prob gap|, trainer against engine", gap, unit="nats", floor=0.0),
        line_chart("Response length", [_series(train, "response_tokens_mean")], unit="tokens", floor=0.0),
        line_chart(
            "Shares", [_series(train, "truncated_share", "truncated"), _series(train, "accuracy", "correct")], floor=0.0
        ),
        line_chart("Entropy", [_series(train, "entropy")], unit="nats", floor=0.0),
        line_chart("Gradient norm", [_series(train, "grad_norm")], floor=0.0),
        line_chart(
            "Largest spectral norm of a rotation's skew block", [_series(train, "adapter_lambda_max")], floor=0.0
        ),
        line_chart("KL to the base", [_series(train, "kl_ref")], unit="nats"),
        line_chart("Resident memory", [_series(train, "rss_gib")], unit="GiB", floor=0.0),
        stacked_bars("Time of a step", steps, split, unit="s"),
    ]


def _memory(folder: RunFolder) -> str:
    found = read_json(folder.memory)
    if not found or not found.get("phases"):
        return ""
    columns = sorted({key for phase in found["phases"].values() for key in phase})
    head = "".join(f"<th>{escape(column_words(column))}</th>" for column in columns)
    lines = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{phase.get(column, 0.0):.2f}</td>' for column in columns)}</tr>"
        for name, phase in found["phases"].items()
    )
    kind = escape(found["process_gib_is"])
    note = f"<p class='sub'>GiB; trainer: {kind}; engine: when the phase ended</p>"
    return f"<table><tr><th>phase</th>{head}</tr>{lines}</table>{note}{_planned(found)}"


def _planned(memory: dict[str, Any]) -> str:
    """Planned against measured: peaks by phase, then what the trainer holds by part."""
    rows = [
        (f"{phase}: {column_words(column)}", pair)
        for phase, columns in memory.get("planned", {}).items()
        for column, pair in columns.items()
    ]
    rows += [(f"held by the trainer: {name.replace('_', ' ')}", pair) for name, pair in memory.get("parts", {}).items()]
    shown = [(name, pair) for name, pair in rows if pair["measured_gib"] is not None]
    if not shown:
        return ""
    lines = "".join(
        f"<tr><th>{escape(name)}</th>{_sizes(pair['planned_gib'], pair['measured_gib'])}"
        f"<td>{_percent(pair['off_percent'])}</td></tr>"
        for name, pair in shown
    )
    return f"<p></p><table><tr><th></th><th>planned</th><th>measured</th><th>planned too much</th></tr>{lines}</table>"


def _sizes(planned: float, measured: float) -> str:
    """Two cells that are compared, so both in one unit: that of the larger."""
    factor, unit = (1.0, "GiB") if max(planned, measured) >= 1 else (1024.0, "MiB")
    digits = 2 if unit == "GiB" else 1
    return "".join(f"<td>{factor * gib:.{digits}f} {unit}</td>" for gib in (planned, measured))


def _percent(off: float | None) -> str:
    return "" if off is None else f"{round(off):+d} %" if round(off) else "0 %"


def _layers(folder: RunFolder) -> str:
    """What layers of each kind cost in the mean: those with routed experts, and those without."""
    found = read_json(folder.layers)
    if not found:
        return ""
    lines = ""
    dense = "layers" if not any("experts_kept_mib" in row for row in found["layers"]) else "layers without such experts"
    for kind, routed in (("layers with routed experts", True), (dense, False)):
        rows = [row for row in found["layers"] if ("experts_kept_mib" in row) is routed]
        for prefix, words in (("", f"{kind} ({len(rows)})"), ("experts_", "of these, the experts")):
            if rows and prefix + "kept_mib" in rows[0]:
                cells = (
                    fmean(row[f"{prefix}{name}"] for row in rows) for name in ("forward_ms", "backward_ms", "kept_mib")
                )
                lines += f"<tr><th>{words}</th>{''.join(f'<td>{cell:.1f}</td>' for cell in cells)}</tr>"
    head = "<tr><th>a layer in the mean</th><th>forward, ms</th><th>backward, ms</th><th>kept, MiB</th></tr>"
    return (
        f"<table>{head}{lines}</table><p class='sub'>a step of {found['tokens']} tokens; {escape(found['about'])}</p>"
    )


def _samples(folder: RunFolder) -> str:
    rows = read_rows(folder.samples)
    half = SAMPLES_SHOWN // 2
    chosen = rows if len(rows) <= SAMPLES_SHOWN else rows[:half] + rows[-half:]  # the first and the last of the run
    shown = []
    for row in chosen:
        reward = "not graded" if row["reward"] is None else f"reward {row['reward']:g}"
        tone = "good" if row["correct"] else "bad"
        wanted = f" · expected {escape(str(row['reference']))}" if row.get("reference") is not None else ""
        shown.append(
            f"<details><summary>step {row['step']} · <span class='{tone}'>{reward}</span> · {row['tokens']} tokens · "
            f"{escape(row['finish_reason'])}{wanted}</summary><pre>{escape(row['prompt'] or row['prompt_id'])}</pre>"
            f"<pre>{escape(row['text'])}</pre></details>"
        )
    return "".join(shown)


def _receipts(folder: RunFolder) -> str:
    found = Receipts.load(folder.receipts)
    if found is None:
        return ""
    pairs = [pair for lines in found.blocks.values() for pair in lines]
    table = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in pairs)
    adapted = "".join(
        f"<tr><th>{escape(row.name)}</th><td>{row.modules} x [{escape(row.shape)}]</td><td>{row.parameters:,}</td></tr>"
        for row in found.adapted
    )
    head = "<tr><th>adapted</th><th>linears x [out x in]</th><th>parameters</th></tr>"
    return f"<table>{table}</table>" + (f"<p></p><table>{head}{adapted}</table>" if adapted else "")
