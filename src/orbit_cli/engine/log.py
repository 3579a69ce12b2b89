"""What engine.log says of the engine's end: the exception that its processes died of, in one line."""

from __future__ import annotations

import re
from pathlib import Path

_READ_BYTES = 256 * 1024
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::\s*(.*))?$")  # module.Name: text
_LONGEST = 600


def log_size(path: Path) -> int:
    """Bytes that are in the log already: of earlier engines, where a run is resumed."""
    return path.stat().st_size if path.is_file() else 0


def last_exception(path: Path, start: int = 0) -> str | None:
    """`Name: text` of the last traceback that was written from byte `start` on; None if there is none."""
    try:
        with open(path, "rb") as log:
            end = log.seek(0, 2)
            log.seek(max(start, end - _READ_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    found, inside = None, False
    for number, line in enumerate(lines):
        if "Traceback (most recent call last):" in line:
            inside = True
        elif inside and line.strip() and not line[0].isspace():
            inside = False
            match = _EXCEPTION.match(line.strip())
            if match:
                found = ": ".join(part for part in (match[1], _text(match[2], lines[number + 1 :])) if part)
    return found


def one_line(text: str) -> str:
    """A message for a sentence: no line breaks, no end of a sentence, not longer than a person reads."""
    joined = " ".join(text.split()).rstrip(".")
    return joined if len(joined) <= _LONGEST else joined[: _LONGEST - 3] + "..."


def _text(first: str | None, after: list[str]) -> str:
    """The exception's message with the indented lines that belong to it."""
    kept = [first or ""]
    for line in after:
        if not line.strip() or not line[0].isspace():
            break
        kept.append(line)
    return one_line(" ".join(kept))
