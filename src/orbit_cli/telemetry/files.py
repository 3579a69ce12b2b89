"""Writing small files so that a crash leaves the old or the new one, never half of one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orbit_cli.errors import UserError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write beside the target, fsync, rename over it; nothing is left of a write that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The mapping in the file, or None if there is no such file. Raises UserError if it is damaged."""
    if not path.is_file():
        return None
    with intact(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError(f"it holds {json.dumps(found)[:40]} and no mapping")
        return found


@contextlib.contextmanager
def intact(path: Path) -> Iterator[None]:
    """Around reading what a file of ours holds: raises UserError naming it where that has another form."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        said = error if isinstance(error, ValueError | TypeError) else repr(error)
        raise UserError(f"{path} is damaged ({said}); restore it, or remove it if it is not needed") from error
