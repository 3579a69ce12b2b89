"""`orbit eval`: accuracy, avg@k, pass@k and maj@k with intervals."""

from __future__ import annotations

from orbit_cli.commands.options import Cfg, Overrides, load_served_config


def evaluate(overrides: Overrides = None, cfg: Cfg = None) -> None:
    """Evaluate on held-out prompts: base and adapter side by side, with bootstrap intervals.

    \b
    orbit eval run.adapter=runs/NAME
    orbit eval run.adapter=runs/NAME evaluation.prompts=256 evaluation.samples=8 evaluation.pass_k=[1,8]
    orbit eval model=checkpoint model.path=/models/qwen3-4b environment=math_file environment.path=test.jsonl
    """
    config, said = load_served_config(overrides, cfg)
    config.check_evaluable()
    from orbit_cli.planner.preflight import preflight

    preflight(config, command="eval", overrides=said)
    from orbit_cli.commands.tables import evaluation_table
    from orbit_cli.runs.evaluate import evaluate as run_evaluation

    print(evaluation_table(run_evaluation(config)))
