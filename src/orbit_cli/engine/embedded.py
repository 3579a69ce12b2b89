"""`sglang.Engine` without what a token-in, token-out engine never uses, so that it starts in a third of the time.

With `skip_tokenizer_init` the scheduler answers the tokenizer's process directly: the detokenizer's process would
import all of SGLang and then wait for ever. SGLang imports every model it knows; here only the checkpoint's own is
looked at. And its scheduler's process imports everything a second time (18 of 40 seconds on two cores); on a CPU it is
forked from this one instead. Imported in the engine's own process alone.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import re
import signal
from pathlib import Path

logger = logging.getLogger(__name__)

_FORK_SAFE = ("jemalloc_bg_thd",)  # of pyarrow; jemalloc stops it before a fork and starts it again after


def narrow_model_registry(architectures: list[str]) -> None:
    """Make SGLang's registry skip the model files that do not define one of `architectures`; call before its import."""
    spec = importlib.util.find_spec("sglang")
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    wanted = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    files = sorted(folder.glob("*.py"))
    defining = {path.stem for path in files if wanted.search(path.read_text(errors="ignore"))}
    if defining and "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ:
        others = [path.stem for path in files if path.stem not in defining]
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)


def start_engine(arguments: dict):
    """A running engine; `arguments` are ServerArgs' fields."""
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):
        @classmethod
        def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
            return [], []

        @classmethod
        def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func):
            if server_args.device != "cpu" or not _single_threaded():
                return super()._launch_scheduler_processes(server_args, port_args, run_scheduler_process_func)
            multiprocessing.set_start_method("fork", force=True)
            try:
                return super()._launch_scheduler_processes(server_args, port_args, _forked(run_scheduler_process_func))
            finally:
                multiprocessing.set_start_method("spawn", force=True)

    return TokenEngine(**arguments)


def _single_threaded() -> bool:
    """A fork copies one thread only: whatever lock another one holds would stay locked in the copy for ever."""
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.is_dir() else []
    others = [name for name in names if name not in _FORK_SAFE]
    if len(others) != 1:
        logger.warning("the scheduler's process is spawned, not forked, because of the threads %s", names)
    return len(others) == 1


def _forked(run_scheduler_process):
    """The scheduler's entry, made to begin as in a process of its own."""

    def run(*args, **kwargs):
        import sglang.srt.plugins as plugins

        plugins._plugins_loaded = False  # they were loaded for the tokenizer's process, which needs none of the hooks
        signal.set_wakeup_fd(-1)  # it would wake our parent's event loop
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        run_scheduler_process(*args, **kwargs)

    return run
