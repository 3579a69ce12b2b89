"""Progress for people: a live table with rate and ETA on a terminal, one plain line per row elsewhere.

Shows what it is given; it writes no file and decides nothing.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from orbit_cli.config.schema.system import ConsoleMode

RECENT_ROWS = 12  # rows of the live table
# column title, metric, format
COLUMNS = (
    ("reward", "reward_mean", "{:.3f}"),
    ("correct", "accuracy", "{:.0%}"),
    ("tokens", "response_tokens_mean", "{:.1f}"),
    ("loss", "loss", "{:+.4f}"),
    ("grad", "grad_norm", "{:.3f}"),
    ("gap", "logprob_gap_mean", "{:.1e}"),
    ("rollout", "rollout_seconds", "{:.1f}s"),
    ("train", "train_seconds", "{:.1f}s"),
    ("sync", "sync_seconds", "{:.1f}s"),
)


class _RunOutput(Console):
    """A console that falls silent when whoever reads it stops reading (`orbit train | head`): the run goes on."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich's way: quiet from here on, and the end of the process
            super().on_broken_pipe()
        with contextlib.suppress(OSError):
            print("orbit: the output was closed; the run goes on, and its folder says how it stands", file=sys.stderr)


class RunConsole:
    """Shows one run. Use as a context manager, so that the terminal is given back whatever happens.

    >>> with RunConsole(ConsoleMode.auto, total_steps=30) as console:
    ...     console.receipts(["seed  0"])
    ...     console.phase("rollout")
    ...     console.row(metrics.write("train", 1, {"reward_mean": 0.1}))
    """

    def __init__(self, mode: ConsoleMode, total_steps: int, *, stream: TextIO | None = None) -> None:
        # soft_wrap: a line is a line, so that paths can be copied and logs searched.
        self._out = _RunOutput(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._rich = mode is ConsoleMode.rich or (mode is ConsoleMode.auto and self._out.is_terminal)
        self._total, self._done = total_steps, 0
        self._paces: list[float] = []  # seconds of each step
        self._started = time.monotonic()
        self._last_progress = 0.0
        self._phase = "starting"
        self._recent: list[dict[str, Any]] = []
        self._last_eval = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def receipts(self, lines: Sequence[str]) -> None:
        """Print the block that a run starts with."""
        for line in lines:
            self._out.print(line, markup=False)

    def start(self, first_step: int = 0) -> None:
        """Training goes on after `first_step` finished steps; a terminal gets its live table from here."""
        self._done = first_step
        if self._rich and self._live is None:
            self._live = Live(self._view(), console=self._out, refresh_per_second=4, transient=True)
            self._live.start()

    def phase(self, name: str) -> None:
        """What is going on now, for example "rollout"; shown on a terminal only."""
        self._phase = name
        self._refresh()

    def progress(self, phase: str, done: int, total: int, tokens_per_second: float) -> None:
        """Progress of a job without training steps: a line now and then (never more than one in two seconds)."""
        now = time.monotonic()
        if done < total and now - self._last_progress < 2.0:
            return
        self._last_progress = now
        pace = (now - self._started) / max(1, done)
        left = f"  ETA {duration(pace * (total - done))}" if done < total else ""
        self.note(f"{phase} {done}/{total} prompts  {tokens_per_second:.0f} tokens/s{left}")

    def note(self, text: str) -> None:
        """A line that stays, above the live table."""
        (self._live.console if self._live else self._out).print(text, markup=False)

    def row(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl as MetricsWriter.write returned it."""
        if row["kind"] == "train":
            self._done = row["step"]
            self._paces += [row["step_seconds"]] if row.get("step_seconds") is not None else []
            self._recent = [*self._recent, row][-RECENT_ROWS:]
            if not self._rich:
                self._out.print(self._plain(row), markup=False)
        elif row["kind"] == "eval":
            self._last_eval = eval_line(row)
            if not self._rich or self._live is None:
                self._out.print(self._last_eval, markup=False)
        self._refresh()

    def close(self) -> None:
        """Leave the finished table on the screen and give the terminal back."""
        if self._live is not None:
            self._live.update(self._view())
            self._live.stop()
            self._live = None
            self._out.print(self._table())
            if self._last_eval:
                self._out.print(self._last_eval, markup=False)

    def eta_seconds(self) -> float | None:
        """Time left for the training steps by their mean pace so far; None before the first is done."""
        if not self._paces:
            return None
        return sum(self._paces) / len(self._paces) * (self._total - self._done)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _plain(self, row: dict[str, Any]) -> str:
        cells = [f"{title} {cell(row.get(name), form)}" for title, name, form in COLUMNS if name in row]
        eta = self.eta_seconds()
        left = f"  ETA {duration(eta)}" if eta is not None and self._done < self._total else ""
        return f"step {row['step']:>3}/{self._total}  " + "  ".join(cells) + left

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("step", justify="right")
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right")
        for row in self._recent:
            table.add_row(str(row["step"]), *(cell(row.get(name), form) for _, name, form in COLUMNS))
        return table

    def _view(self) -> Group:
        rate = self._recent[-1].get("rollout_tokens_per_second") if self._recent else None
        eta = self.eta_seconds()
        speed = f"{rate:.0f} tokens/s" if rate else ""
        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}")
        )
        more = "  ".join(part for part in (speed, f"ETA {duration(eta)}" if eta is not None else "") if part)
        progress.add_task(f"{self._phase:<10}", total=self._total, completed=self._done, more=more)
        lines = [self._table(), progress]
        return Group(*lines, self._last_eval) if self._last_eval else Group(*lines)


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def duration(seconds: float) -> str:
    """`42s`, `3m10s`, `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def eval_line(row: dict[str, Any]) -> str:
    """One line on an evaluation: accuracy with its interval, and pass@k."""
    what = f"eval of {row['policy']}" if "policy" in row else f"eval at step {row['step']}"
    parts = [f"{what}: accuracy {cell(row.get('accuracy'), '{:.3f}')}"]
    if row.get("accuracy_low") is not None:
        parts.append(f"[{row['accuracy_low']:.3f}, {row['accuracy_high']:.3f}]")
    parts += [f"{name} {cell(value, '{:.3f}')}" for name, value in row.items() if re.fullmatch(r"pass@\d+", name)]
    return "  ".join(parts)
