"""The table at the end of a sweep: one row per job, and the logs of those that failed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from orbit_cli.telemetry.report import figures

if TYPE_CHECKING:
    from orbit_cli.commands.sweep import Job

COLUMNS = ("job", "overrides", "status", "reward", "held out", "gap", "run")
SAYS = "orbit: "  # begins the one sentence of an error
FILE_WIDTH = 200  # columns of a table that goes into a file or a pipe, where nothing needs to fold


def print_table(jobs: list[Job]) -> None:
    """Overrides that all jobs share are left out; runs are named below the sweep's folder, which is printed once."""
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        table.add_row(*_row(job, shared))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=FILE_WIDTH)
    console.print(table)
    console.print(f"sweep  {Path(jobs[0].folder).parent}")
    failed = [job for job in jobs if job.exit_code]
    for job in failed:
        log = Path(job.folder) / "log.txt"
        console.print(f"job {job.number} failed with exit code {job.exit_code}: {_reason(log) or log}")
    if failed:
        console.print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished")


def _reason(log: Path) -> str:
    """The sentence with which a job was refused or gave up; empty if its log ends with something else."""
    try:
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
    except OSError:
        return ""
    return last.removeprefix(SAYS) if last.startswith(SAYS) else ""


def _row(job: Job, shared: set[str]) -> list[str]:
    status = "finished" if job.exit_code == 0 else f"failed ({job.exit_code})"
    head = [str(job.number), " ".join(name for name in job.overrides if name not in shared), status]
    if job.run is None:
        return [*head, "-", "-", "-", "-"]
    found = figures(job.run)
    gap = found["logprob_gap_mean"]
    return [
        *head,
        _pair(found["reward_first_fifth"], found["reward_last_fifth"]),
        _pair(_accuracy(found["eval_before"]), _accuracy(found["eval_after"])),
        "-" if gap is None else f"{gap:.1e}",
        f"{Path(job.folder).name}/{Path(job.run).name}",
    ]


def _accuracy(row: dict[str, Any] | None) -> float | None:
    return None if row is None else row["accuracy"]


def _pair(before: float | None, after: float | None) -> str:
    return " -> ".join("-" if value is None else f"{value:.3f}" for value in (before, after))
