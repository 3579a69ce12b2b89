"""metrics.jsonl: append-only, one JSON object per training step, evaluation and publish; on disk before it returns.

A resumed run drops the rows after the step it goes on from, so that no step is counted twice. What the names mean is in
names.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from orbit_cli.errors import UserError
from orbit_cli.telemetry.files import AppendedFile, write_atomic
from orbit_cli.telemetry.names import KINDS, ROW_KEYS


class JsonLines(AppendedFile):
    """An append-only JSONL file; each row is on disk before `row` returns, or not there at all."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """resume_step: keep only rows whose `step` is at most this; None keeps all. A torn last line is dropped."""
        super().__init__(path)
        rows = read_rows(path)
        if resume_step is not None:
            rows = [row for row in rows if row.get("step", 0) <= resume_step]
        if path.exists():
            write_atomic(path, "".join(_line(row) for row in rows))

    def row(self, row: dict[str, Any]) -> None:
        self.append(_line(row))


class MetricsWriter(JsonLines):
    """metrics.jsonl of a run.

    >>> with MetricsWriter(folder.metrics) as metrics:
    ...     metrics.write("train", 1, {"reward_mean": 0.25, "version": 1})
    """

    def write(
        self, kind: str, step: int, metrics: Mapping[str, float | int | None], policy: str | None = None
    ) -> dict[str, Any]:
        """Append one row and return it as written. What the names mean is in names.py."""
        if kind not in KINDS:
            raise ValueError(f"metrics kind {kind!r} is none of {KINDS}")
        row = {"kind": kind, "step": step, "time": datetime.now().astimezone().isoformat(timespec="milliseconds")}
        row |= {"policy": policy} if policy is not None else {}
        row |= {name: _number(value) for name, value in metrics.items()}
        self.row(row)
        return row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows. A last line cut by a crash is left out; damage elsewhere raises UserError."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    complete = lines[:-1]  # what follows the last newline was never finished
    rows = []
    for number, line in enumerate(complete, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_checked(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged in line {number} ({error}); remove that line") from error
    return rows


def _checked(row: Any) -> dict[str, Any]:
    """A row whose readers may count on its form: a step, and of metrics.jsonl numbers under all other names."""
    if not isinstance(row, dict):
        raise TypeError(f"{json.dumps(row)[:40]} is no row")
    if "kind" not in row and "step" not in row:
        return row
    if not isinstance(row.get("step"), int):
        raise TypeError(f"step is {row.get('step')!r} and no whole number")
    for name, value in row.items() if "kind" in row else ():
        if name not in ROW_KEYS and not isinstance(value, int | float | None):
            raise TypeError(f"{name} is {value!r} and no number")
    return row


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _number(value: Any) -> float | int | None:
    """Plain number for JSON. A 0-dim tensor or numpy scalar gives its item; what is not finite becomes null."""
    if value is None or isinstance(value, bool):
        return value if value is None else int(value)
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
