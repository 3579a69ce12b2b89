"""Progress of `orbit quantize`: a bar with rate and ETA on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

SECONDS_BETWEEN_LINES = 5.0
