"""The exceptions of Orbit.

OrbitError
├── UserError            bad input: one sentence with what was set, why it cannot work, what to set; exit code 2
│   ├── ConfigError      a config key, value, group or recipe
│   └── CheckpointError  a checkpoint file or folder that is missing, truncated or of another model
├── EngineError          SGLang failed to start, crashed, or refused a request; carries its last lines
├── ParityError          trainer and engine do not compute the same thing; names the cause; exit code 1
└── RunError             a run stopped for a reason of its own (for example no prompt left a gradient)

ToldInterrupt is a KeyboardInterrupt, no OrbitError: nothing failed.

`UserError` is also a `ValueError`, so a check in a dataclass's `__post_init__` reads as ordinary Python.
"""


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
    """The rollout engine failed. The message ends with the engine's own last lines where there are any."""


class ParityError(OrbitError):
    """Trainer and engine disagree: an adapter that never arrived, a stale cache, an altered base."""


class RunError(OrbitError):
    """A run that cannot go on, for a reason that is not the user's input."""


class ToldInterrupt(KeyboardInterrupt):
    """A stop by Ctrl-C of which the person has been told already; exit code 130 without a further word."""
