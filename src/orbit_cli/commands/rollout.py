"""`orbit rollout`: sample and score a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    print(written_text(done))


def written_text(done: Mapping[str, Any]) -> str:
    """What `collect` returned, for people; how much of it is new only where the file was gone on with.

    >>> written_text({"output": "out.jsonl", "rows": 80, "prompts": 10, "new_rows": 16, "new_prompts": 2})
    'out.jsonl has 80 rows of 10 prompts: 16 rows of 2 prompts are new'
    """
    text = f"{done['output']} has {_counted(done['rows'], 'row')} of {_counted(done['prompts'], 'prompt')}"
    if done["new_rows"] == done["rows"]:
        return text
    if not done["new_rows"]:
        return f"{text}: none is new, all were there"
    verb = "is" if done["new_rows"] == 1 else "are"
    return f"{text}: {_counted(done['new_rows'], 'row')} of {_counted(done['new_prompts'], 'prompt')} {verb} new"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
