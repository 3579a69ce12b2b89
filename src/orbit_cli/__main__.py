"""`orbit`, and `python -m orbit_cli`. Imports nothing heavy at first, so that Ctrl-C is quiet while the rest is."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Import the command line and run it; exit codes as in cli.py."""
    try:
        _import()
        from orbit_cli.cli import main as run

        run()
    except KeyboardInterrupt:  # before the import, or after the command; cli.py tells what comes in between
        print("orbit: interrupted", file=sys.stderr)
        sys.exit(130)


def _import() -> None:
    """Import cli.py. Ctrl-C ends the process meanwhile: an exception inside an import may come out as any other."""
    import signal

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # else it is ignored, as a shell does for what runs in the background
    if ours:
        signal.signal(signal.SIGINT, _end)
    import orbit_cli.cli  # noqa: F401

    if ours:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> None:
    os.write(2, b"orbit: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
