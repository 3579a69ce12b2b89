"""`orbit report`: the figures and the page of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, for scripts.")] = False,
) -> None:
    """Print what came out of a run, and write its report.html (one file, opens offline).

    \b
    orbit report runs/NAME
    orbit report runs/NAME --json
    """
    from orbit_cli.telemetry.report import figures, summary_text, write_report

    if as_json:
        print(json.dumps(figures(run), indent=2, allow_nan=False))
        return
    write_report(run)
    print(summary_text(figures(run)))  # which names the page
