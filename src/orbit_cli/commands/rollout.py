"""`orbit rollout`: sample and score a dataset."""

from __future__ import annotations

from orbit_cli.commands.options import Cfg, Overrides, load_served_config
from orbit_cli.errors import StorageError


def rollout(overrides: Overrides = None, cfg: Cfg = None) -> None:
    """Sample an environment's prompts and score them, to JSONL or Parquet; a broken-off file is gone on with.

    \b
    orbit rollout run.output=samples.jsonl
    orbit rollout run.adapter=runs/NAME run.output=after.parquet rollout.group_size=8
    orbit rollout environment=math_file environment.path=test.jsonl run.output=out.jsonl
    """
    config, said = load_served_config(overrides, cfg)
    from orbit_cli.planner.preflight import preflight

    preflight(config, command="rollout", overrides=said)
    from orbit_cli.runs.collect import collect

    try:
        done = collect(config)
    except StorageError as error:
        raise StorageError(f"{error} and start it again with the same arguments") from error
    print(f"wrote {done['rows']} rows of {done['prompts']} prompts to {done['output']} ({done['skipped']} were there)")
