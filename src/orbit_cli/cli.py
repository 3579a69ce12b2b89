"""The `orbit` command: one Typer command per module in commands/, and what becomes of exceptions.

Imports nothing heavy: `orbit --help` must not wait for torch, Hydra or SGLang. Every knob is a config field, so the
commands have no options but `--multirun` and `--cfg`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from orbit_cli.commands import config, doctor, evaluate, plan, quantize, report, rollout, sync_test, train
from orbit_cli.commands.usage import usage_sentence
from orbit_cli.errors import OrbitError, ToldInterrupt, storage_error

INTERRUPTED = 130
HELP = """\
Reinforcement learning of language models on a frozen low-precision base with a small adapter.

Every setting is an override, key=value: `orbit config` shows them all, `orbit config explain KEY` says what one means.

\b
    orbit train                                        the main job, on any machine
    orbit train model=tiny_moe adapter=lora trainer.steps=5
    orbit train recipe=smoke_moe_lora                  a recipe by name
    orbit train -m adapter=oft,lora seed=1,2           a sweep: a run each, and a summary table
    orbit plan model=kimi_k26 hardware=b200x8          does it fit, and what to change, before anything is loaded
    orbit report runs/NAME                             what came out of a run
"""

# What a file or folder refuses for reasons outside of Orbit, wherever it shows.
_OF_THE_MACHINE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG}


class Commands(TyperGroup):
    """The commands; says that one was interrupted, which Typer turns into exit code 130 without a word."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _interrupt_is_told():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _interrupt_is_told():
            return super().invoke(ctx)


@contextmanager
def _interrupt_is_told() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        if not isinstance(stop, ToldInterrupt):
            print("orbit: interrupted", file=sys.stderr)
        raise ToldInterrupt from stop


app = typer.Typer(
    name="orbit",
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    suggest_commands=False,  # usage.py does
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("rollout")(rollout.rollout)
app.command("eval")(evaluate.evaluate)
app.command("quantize")(quantize.quantize)
app.command("sync-test")(sync_test.sync_test)
app.command("config")(config.config)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed (a traceback means a bug), 2 bad input, 130 interrupted."""
    code = _run()
    sys.exit((code or 0) if _flushed() else code or 1)


def _run() -> int | str | None:
    """The exit code of the command (None: 0); what stopped it is told in one sentence, a bug raises."""
    try:
        if len(sys.argv) == 1:
            app()  # the help, from Typer
        return app(standalone_mode=False)  # Typer's own exceptions come out, and the exit code of typer.Exit
    except SystemExit as end:
        return end.code
    except OrbitError as error:
        return _failed(str(error), error.exit_code)
    except typer.TyperException as error:
        return _failed(usage_sentence(error), 2)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except Exception as error:  # a full disk shows as whatever a library makes of it; anything else is raised again
        if isinstance(error, OSError) and error.filename is None and not _flushed(b"\n"):
            return 1
        full = storage_error(error, Path.cwd())
        if full is not None:
            return _failed(str(full), full.exit_code)
        if not isinstance(error, OSError) or error.filename is None or error.errno not in _OF_THE_MACHINE:
            raise
        return _failed(f"{error.filename} cannot be used: {error.strerror}", 1)


def _failed(sentence: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody can be told
        print(f"orbit: {sentence}", file=sys.stderr)
    return code


def _flushed(probe: bytes = b"") -> bool:
    """Write out what was printed; if that fails, say so and drop it.

    `probe` is written too: a failed write leaves nothing behind that would fail again.
    """
    try:
        sys.stdout.flush()
        if probe:
            os.write(sys.stdout.fileno(), probe)
        return True
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries again at its end
        sys.stdout.flush()
        if error.errno != errno.EPIPE:  # whoever read it may stop reading
            _failed(f"standard output cannot be written ({error.strerror}); send it to a file on a disk with room", 1)
        return False
