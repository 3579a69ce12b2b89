"""How wide a plan is printed: the terminal's columns, or a file's, from NARROW to WIDE. Figures are never cut."""

from __future__ import annotations

import shutil
import textwrap

NARROW, WIDE = 60, 100


def columns(narrowest: int = NARROW, widest: int = WIDE) -> int:
    """Columns to print in: those of the terminal (COLUMNS is asked first), within the given bounds."""
    return min(max(shutil.get_terminal_size((widest, 0)).columns, narrowest), widest)


def wrapped(start: str, text: str) -> list[str]:
    """`text` in lines behind `start`; a number, key or override is never cut, so that it can be pasted."""
    width, after = columns(), " " * len(start)
    if 2 * len(start) > width:  # nothing would fit beside it
        first, after = text.partition(" ")[0], " " * 6
        if len(start) + len(first) > width:
            return [start.rstrip(), *_lines(text, width, after, after)]
    return _lines(text, width, start, after)


def _lines(text: str, width: int, start: str, after: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=after, break_on_hyphens=False, break_long_words=False
    )
