"""`orbit doctor`: what this machine has, what will work here, and what to install."""

from __future__ import annotations

from orbit_cli.errors import OrbitError


def doctor() -> None:
    """Check this machine: hardware, the pinned packages, the engine plugin, the shipped model.

    Ends with exit code 1 if something that Orbit needs is missing.

    \b
    orbit doctor
    """
    from orbit_cli.commands.machine import inspect_machine

    findings = inspect_machine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.mark:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':<4}  {'':<{width}}  -> {finding.remedy}")
    missing = [finding.name for finding in findings if finding.mark == "FAIL"]
    if missing:
        raise OrbitError(f"missing or wrong: {', '.join(missing)}")
