"""Results as plain text tables: of `orbit eval` and of `orbit sync-test`."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from orbit_cli.sync.proof import Check

_INTERVALS = re.compile(r".*_(low|high)")
_COUNTS = ("prompts", "samples", "grading_failures")


def evaluation_table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """{policy: {dataset: figures}} -> a row per figure, a column per policy and dataset, side by side."""
    columns = [(policy, dataset) for policy, datasets in results.items() for dataset in datasets]
    names = list(dict.fromkeys(name for policy, dataset in columns for name in results[policy][dataset]))
    several = len({dataset for _, dataset in columns}) > 1
    rows = []
    for name in names:
        if not _INTERVALS.fullmatch(name):
            rows.append([name, *(_figure(results[policy][dataset], name) for policy, dataset in columns)])
    titles = [f"{policy} / {dataset}" if several else policy for policy, dataset in columns]
    return _text(["", *titles], rows)


def sync_table(checks: Sequence[Check]) -> str:
    """A row per check: what was compared, the figures, and why it failed."""
    rows = [
        [
            "pass" if check.passed else "FAIL",
            check.name,
            _small(check.gap_mean),
            _small(check.gap_max),
            _small(check.moved),
            "-" if check.milliseconds is None else f"{check.milliseconds:.0f}",
            "-" if check.nbytes is None else f"{check.nbytes:,}",
            check.cause,
        ]
        for check in checks
    ]
    return _text(["", "check", "mean gap", "max gap", "moved", "ms", "bytes", "cause"], rows)


def _figure(figures: Mapping[str, float], name: str) -> str:
    value = figures.get(name)
    if value is None or math.isnan(value):
        return "-"
    if name in _COUNTS:
        return f"{value:.0f}"
    low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{value:.3f}{interval}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _text(titles: list[str], rows: list[list[str]]) -> str:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=240, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
