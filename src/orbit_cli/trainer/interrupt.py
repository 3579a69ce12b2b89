"""Ctrl-C: the first asks the run to stop after the step in progress, the second stops at once.

Before training has begun there is no step to finish, and the first stops at once.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from orbit_cli.errors import ToldInterrupt


class StopRequest:
    """Context manager around a run; `requested` turns true at the first SIGINT or SIGTERM after `begin`."""

    def __init__(self) -> None:
        self.requested = False
        self._begun = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def begin(self) -> None:
        """From now on a stop waits for the step in progress."""
        self._begun = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._begun:
            print("\norbit: stopped before training began", file=sys.stderr, flush=True)
        if self.requested or not self._begun:
            raise ToldInterrupt
        self.requested = True
        print("\norbit: stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
