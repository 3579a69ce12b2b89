"""The exceptions of Orbit.

OrbitError
├── UserError            bad input: one sentence with what was set, why it cannot work, what to set; exit code 2
│   ├── ConfigError      a config key, value, group or recipe
│   └── CheckpointError  a checkpoint file or folder that is missing, truncated or of another model
├── StorageError         a disk, quota or file-size limit that is used up; what was finished before it is whole
├── EngineError          SGLang failed to start, crashed, or refused a request; names the cause and the log
├── ParityError          trainer and engine do not compute the same thing; names the cause; exit code 1
└── RunError             a run stopped for a reason of its own (for example no prompt left a gradient)
    └── NotFiniteError   gradients or adapter values that are NaN or infinite

ToldInterrupt is a KeyboardInterrupt, no OrbitError: nothing failed.

`UserError` is also a `ValueError`, so a check in a dataclass's `__post_init__` reads as ordinary Python.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# errno -> how libraries that drop it write it, what it means, what to do
_USED_UP = {
    errno.ENOSPC: ("No space left on device", "the disk is full", "make room"),
    errno.EDQUOT: ("Disk quota exceeded", "the disk quota is used up", "make room"),
    errno.EFBIG: ("File too large", "a file may not grow that large here (ulimit -f)", "lift that limit"),
}


class OrbitError(Exception):
    """Root of all errors that Orbit raises on purpose."""

    exit_code = 1


class UserError(OrbitError, ValueError):
    """Bad input. The message says what was set, why it cannot work and what to set."""

    exit_code = 2


class ConfigError(UserError):
    """A config key, value, group or recipe that cannot work."""


class CheckpointError(UserError):
    """A checkpoint that is missing, truncated, unsafe to use or of another model."""


class EngineError(OrbitError):
    """The rollout engine failed. The message gives what its processes died of and the path of its log."""


class StorageError(OrbitError):
    """Nothing more can be written. The message names the file or folder and ends with what to do first."""


class ParityError(OrbitError):
    """Trainer and engine disagree: an adapter that never arrived, a stale cache, an altered base."""


class RunError(OrbitError):
    """A run that cannot go on, for a reason that is not the user's input."""


class NotFiniteError(RunError):
    """Gradients or adapter values that are NaN or infinite; found before anything is published."""


class ToldInterrupt(KeyboardInterrupt):
    """A stop by Ctrl-C of which the person has been told already; exit code 130 without a further word."""


def storage_error(error: BaseException, where: Path | str) -> StorageError | None:
    """What is to be said of `error` if it, or what it came from, means that nothing more can be written; else None.

    `where` is named unless the error knows its file. Libraries wrap the system's error or keep only its text.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, StorageError):
            return cause
        seen.append(cause)
        for number, (text, meaning, remedy) in _USED_UP.items():
            if getattr(cause, "errno", None) == number or text in str(cause):
                path = getattr(cause, "filename", None) or where
                return StorageError(f"{path} cannot be written: {meaning}; {remedy}")
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Inside, an error that means a full disk becomes a StorageError that names `path`."""
    try:
        yield
    except Exception as error:  # torch and safetensors raise RuntimeErrors of their own for it
        full = storage_error(error, path)
        if full is None:
            raise
        raise full from error
