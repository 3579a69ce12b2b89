"""Ctrl-C: the first asks the run to stop after the step in progress, the second stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType


class StopRequest:
    """Context manager around a run; `requested` turns true at the first SIGINT or SIGTERM."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\norbit: stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
