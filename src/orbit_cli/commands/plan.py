"""`orbit plan`: what a config needs, by part and phase, before anything is loaded."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orbit_cli.commands.options import Cfg, Overrides, load_config, load_served_config
from orbit_cli.errors import ConfigError, UserError

if TYPE_CHECKING:
    from orbit_cli.config.schema import OrbitConfig
    from orbit_cli.planner.plan import Plan


class Work(StrEnum):
    """The command that is planned."""

    train = "train"
    rollout = "rollout"
    eval = "eval"


def plan(
    overrides: Overrides = None,
    work: Annotated[Work, typer.Option("--for", help="The command to plan; rollout and eval have no trainer.")] = (
        Work.train
    ),
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="One line per combination of comma-separated values.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, formulas included (keys: docs/planning.md).")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Instead of the plan: the formula of every number, and every word.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="The published study: four recipes over model size.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="With --compare: draw it into this file (.svg, .png, .pdf).", show_default=False),
    ] = None,
    cfg: Cfg = None,
) -> None:
    """Say whether a run fits, whether Orbit can run it, and what to change; takes the overrides of orbit train.

    \b
    orbit plan model=kimi_k26 hardware=b200x8
    orbit plan model=kimi_k26 hardware=h200x8 memory.shared_base=true --explain
    orbit plan --for rollout model=qwen3_30b_a3b hardware=rtx4090x1
    orbit plan -m model=qwen3_4b,qwen3_30b_a3b hardware=rtx4090x1,h200x1
    orbit plan --compare --plot study.svg

    Exit code: 0 if it fits and runs (or the memory is unknown), 1 if it does not fit, 2 for bad input, 3 if it fits and
    Orbit cannot run it yet. So `orbit plan ... && orbit train ...` starts only what fits and runs. With -m: 1 if any of
    the runs does not fit or cannot be laid out, else 3 if any cannot be run yet.
    """
    _check_options(compare, plot, multirun, explain, as_json)
    if compare:
        _compare(overrides or [], plot, as_json)
        return
    code = _several(overrides or [], work, as_json) if multirun else _one(overrides, work, as_json, explain, cfg)
    if code:
        raise typer.Exit(code)


def _check_options(compare: bool, plot: Path | None, multirun: bool, explain: bool, as_json: bool) -> None:
    """Refuse options that would be ignored. Raises ConfigError."""
    if plot is not None and not compare:
        raise ConfigError(f"--plot {plot} draws the study of --compare; add --compare")
    if compare and multirun:
        raise ConfigError("--compare shows fixed models; leave out -m")
    if explain and (multirun or compare or as_json):
        other = "-m" if multirun else "--compare" if compare else "--json, which has the formulas"
        raise ConfigError(f"--explain explains one plan in words; leave out {other}")


def _one(overrides: list[str] | None, work: Work, as_json: bool, explain: bool, cfg: Cfg) -> int:
    """Print one plan; the exit code."""
    made = _planned(_config(overrides, cfg, work, note=not as_json), work)
    if as_json:
        from orbit_cli.planner.view import to_json

        print(json.dumps(to_json(made, command=work), indent=2, allow_nan=False))
    elif explain:
        from orbit_cli.commands.plan_formulas import formulas_text

        print(formulas_text(made))
    else:
        from orbit_cli.commands.plan_text import plan_text

        print(plan_text(made, command=work))
    return _code(made, work)


def _config(overrides: list[str] | None, cfg: Cfg, work: Work, *, note: bool) -> OrbitConfig:
    """As the planned command would compose it: rollout and eval take what run.adapter names from its run."""
    return load_config(overrides, cfg) if work is Work.train else load_served_config(overrides, cfg, note=note)[0]


def _planned(config: OrbitConfig, work: Work) -> Plan:
    """The plan of what the command would run. Raises ConfigError or CheckpointError for what it would refuse."""
    from orbit_cli.planner.checkpoint import check_files
    from orbit_cli.planner.plan import make_plan

    if work is Work.train:
        config.check_trainable()
    elif work is Work.eval:
        config.check_evaluable()
    made = make_plan(config, trains=work is Work.train, evaluates=work is Work.eval)
    check_files(config.model, config_suffices=True)
    return made


def _several(overrides: list[str], work: Work, as_json: bool) -> int:
    """Print a line for each combination, in their order; the exit code."""
    from orbit_cli.commands.plan_tables import plans_text
    from orbit_cli.config.overrides import combinations

    made: list[tuple[list[str], Plan | str]] = []
    for _, chosen in combinations(overrides):
        try:
            made.append((chosen, _planned(_config(chosen, None, work, note=False), work)))
        except ConfigError as error:  # one combination that cannot be laid out does not hide the others
            made.append((chosen, str(error)))
    if as_json:
        from orbit_cli.planner.view import refused_json, to_json

        rows = []
        for chosen, one in made:
            row = refused_json(one, command=work) if isinstance(one, str) else to_json(one, command=work)
            rows.append({"overrides": chosen, **row})
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        print(plans_text(made, command=work))
    codes = {1 if isinstance(one, str) else _code(one, work) for _, one in made}
    return 1 if 1 in codes else max(codes, default=0)


def _code(made: Plan, work: Work) -> int:
    """The exit code that stands for a plan's verdict."""
    from orbit_cli.planner.built import Verdict, verdict

    return {Verdict.too_large: 1, Verdict.not_built: 3}.get(verdict(made, trains=work is Work.train), 0)


def _compare(overrides: list[str], plot: Path | None, as_json: bool) -> None:
    if overrides:
        raise ConfigError(f"{overrides[0]}: --compare shows fixed models; leave the overrides out")
    from dataclasses import asdict

    from orbit_cli.commands.plan_tables import study_text
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
