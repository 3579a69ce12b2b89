"""`orbit train`: the RL loop, or a sweep of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orbit_cli.commands.options import Cfg, Overrides, load_config


def train(
    overrides: Overrides = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="One run per combination of comma-separated values.")
    ] = False,
    cfg: Cfg = None,
) -> None:
    """Train an adapter with reinforcement learning. Without arguments: the main job.

    \b
    orbit train
    orbit train model=tiny_moe adapter=lora algorithm=dapo environment=rare_letter experiment=quick_look
    orbit train recipe=smoke_mla_moe run.name=mine
    orbit train run.resume=auto
    orbit train -m recipe=sweep_adapters adapter=oft,lora seed=1,2
    """
    if multirun:
        from orbit_cli.commands.sweep import run_sweep

        raise typer.Exit(run_sweep(overrides or [], show_config=cfg is not None))
    config = load_config(overrides, cfg)
    resumed = config.run.resume not in (None, "auto")
    if resumed:
        from orbit_cli.config.resume import resumed_config

        config = resumed_config(overrides or [], config.run.resume)
    config.check_trainable()
    from orbit_cli.planner.preflight import preflight

    preflight(config, command="train", overrides=None if resumed else overrides or [])
    from orbit_cli.runs.train import train as run_training
    from orbit_cli.telemetry.report import figures, summary_text

    run = run_training(config)["run"]
    print(summary_text(figures(Path(run))))
