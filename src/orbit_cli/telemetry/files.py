"""Writing small files so that a crash leaves the old or the new one, never half of one."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbit_cli.errors import UserError, writing


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write beside the target, fsync, rename over it; nothing is left of a write that fails.

    Raises StorageError if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
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


class AppendedFile:
    """A file that grows by whole pieces: each is on disk when `append` returns, and nothing is left of one that fails.

    A file that was not there before appears with its first piece.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def append(self, text: str) -> None:
        """Raises StorageError if the disk is full."""
        data = memoryview(text.encode("utf-8"))
        with writing(self._path):
            new = not self._path.exists()
            if self._file is None:
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
            size = os.fstat(self._file.fileno()).st_size
            try:
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), size)
                if new:
                    self._path.unlink(missing_ok=True)
                    self.close()
                raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
