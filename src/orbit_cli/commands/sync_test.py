"""`orbit sync-test`: do trainer and engine compute the same thing?"""

from __future__ import annotations

from orbit_cli.commands.options import Cfg, Overrides, load_config
from orbit_cli.errors import ParityError


def sync_test(overrides: Overrides = None, cfg: Cfg = None) -> None:
    """Prove that trainer and engine agree: base, a random adapter, and swaps with requests in flight.

    Ends with exit code 1, naming the cause, when they do not.

    \b
    orbit sync-test recipe=smoke_dense_oft
    orbit sync-test recipe=smoke_moe_lora sync.swaps=5
    orbit sync-test sync.inject=withhold      see it fail on purpose
    """
    config = load_config(overrides, cfg)
    from orbit_cli.planner.preflight import require_address_space

    require_address_space()
    from orbit_cli.commands.tables import sync_table
    from orbit_cli.runs.sync_test import sync_test as run_sync_test

    result = run_sync_test(config)
    print(sync_table(result.checks))
    print(f"json  {result.path}")
    if not result.passed:
        raise ParityError(next(check.cause for check in result.checks if not check.passed))
