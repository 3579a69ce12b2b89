"""`orbit plan`: what a config needs, by part and phase, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from orbit_cli.commands.options import Cfg, Overrides, load_config
from orbit_cli.errors import ConfigError, UserError


def plan(
    overrides: Overrides = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="One line per combination of comma-separated values.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, formulas included.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formula of every number.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="The published study: four recipes over model size.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="With --compare: draw it into this file (.svg, .png, .pdf).", show_default=False),
    ] = None,
    cfg: Cfg = None,
) -> None:
    """Say whether a run fits, what limits it and what to change; takes the overrides of orbit train.

    \b
    orbit plan model=kimi_k26 hardware=b200x8
    orbit plan model=kimi_k26 hardware=h200x8 memory.shared_base=true --explain
    orbit plan model=qwen3_30b_a3b hardware=rtx4090x1 --json
    orbit plan -m model=deepseek_v4_flash,deepseek_v4_pro hardware=h200x8,b200x8
    orbit plan --compare --plot study.svg

    Exit code: 0 if it fits, 1 if not, 2 for bad input; with -m 1 if any of the runs does not fit or cannot be laid out.
    So `orbit plan ... && orbit train ...` starts only what fits. "Cannot be told" (memory unknown) counts as 0.
    """
    if plot is not None and not compare:
        raise ConfigError(f"--plot {plot} draws the study of --compare; add --compare")
    if compare:
        _compare(overrides or [], plot, as_json)
        return
    fits = _several(overrides or [], as_json) if multirun else _one(overrides, as_json, explain, cfg)
    if not fits:
        raise typer.Exit(1)


def _one(overrides: list[str] | None, as_json: bool, explain: bool, cfg: Cfg) -> bool:
    """Print one plan; whether it fits."""
    config = load_config(overrides, cfg)
    from orbit_cli.commands.plan_text import plan_text
    from orbit_cli.planner.plan import make_plan

    made = make_plan(config)
    if as_json:
        from orbit_cli.planner.view import to_json

        print(json.dumps(to_json(made), indent=2, allow_nan=False))
    else:
        print(plan_text(made, explain=explain))
    return made.fits


def _several(overrides: list[str], as_json: bool) -> bool:
    """Print a line for each combination; whether all fit."""
    from orbit_cli.commands.plan_text import plans_text
    from orbit_cli.config.compose import compose
    from orbit_cli.config.overrides import combinations
    from orbit_cli.planner.plan import make_plan

    made, refused = {}, {}
    for own, all_of_it in combinations(overrides):
        try:
            made[own] = make_plan(compose(all_of_it))
        except ConfigError as error:  # one combination that cannot be laid out does not hide the others
            refused[own] = str(error)
    if as_json:
        from orbit_cli.planner.view import to_json

        rows = [{"overrides": own.split(), **to_json(one)} for own, one in made.items()]
        rows += [{"overrides": own.split(), "fits": False, "limit": why} for own, why in refused.items()]
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        print(plans_text(made, refused))
    return not refused and all(plan.fits for plan in made.values())


def _compare(overrides: list[str], plot: Path | None, as_json: bool) -> None:
    if overrides:
        raise ConfigError(f"{overrides[0]}: --compare shows fixed models; leave the overrides out")
    from dataclasses import asdict

    from orbit_cli.commands.plan_text import study_text
    from orbit_cli.planner.study import study
    from orbit_cli.planner.study_plot import FORMATS
    from orbit_cli.planner.study_plot import plot as draw

    kind = plot.suffix.removeprefix(".").lower() if plot is not None else ""
    if plot is not None and kind not in FORMATS:
        raise ConfigError(f"--plot {plot}: its ending is no picture's; give a name that ends in .{', .'.join(FORMATS)}")
    rows = study()
    if plot is not None:  # first, so that a path that cannot be written is all that is said
        _write(plot, draw(rows, kind))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(study_text(rows))
    if plot is not None:
        print(f"drawn into {plot}")


def _write(path: Path, content: bytes) -> None:
    """The whole file or none. Raises UserError for a path that cannot be written."""
    from orbit_cli.telemetry.files import write_atomic

    try:
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"--plot {path} cannot be written ({error.strerror}); give another path") from error
