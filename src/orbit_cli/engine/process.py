"""The engine's process as its owner sees it: started, talked to, watched, and ended without leftovers.

SGLang starts processes of its own, installs signal handlers, kills process groups when one of them fails and writes to
the console. All of that happens in a process (host.py) with its own session and its own log file, so a failing engine
is an exception here, Ctrl-C reaches only us, and when we die in whatever way the engine dies too (the channel closes,
and the kernel signals it). One thread per engine starts the process and reads its answers for as long as it lives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from orbit_cli.engine.channel import Channel
from orbit_cli.engine.log import last_exception, log_size
from orbit_cli.errors import EngineError, OrbitError

_END_TIMEOUT_S = 15.0


class EngineProcess:
    """One running engine. Calls return futures; every future fails with EngineError once the process is gone."""

    def __init__(self, settings: dict[str, Any], environment: dict[str, str], log_path: Path):
        self.settings, self.environment, self.log_path = settings, environment, Path(log_path)
        self._numbers = itertools.count()
        self._pending: dict[int, Future] = {}
        self._lock = threading.Lock()
        self._failure: EngineError | None = None
        self._process: subprocess.Popen | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._ready: Future | None = None
        self._log_start = 0  # where this engine's part of the log begins

    def launch(self) -> None:
        """Start the process and return at once; it loads while the caller does something else."""
        launched: queue.Queue = queue.Queue()
        self._ready = self._expect(next(self._numbers))
        # The kernel ties "die with your parent" to the thread that forked, so the thread that reads also forks.
        self._thread = threading.Thread(target=self._own, args=(launched,), name="orbit-engine", daemon=True)
        self._thread.start()
        error = launched.get()
        if error is not None:
            raise EngineError(f"the engine's process could not be started: {error}") from error
        with contextlib.suppress(OSError):  # it died already; whoever waits for it hears why
            self._channel.send((0, "start", self.settings))

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Until the engine serves; returns its first report. Raises EngineError or the refusal."""
        try:
            return self._ready.result(timeout=timeout_s)
        except TimeoutError:
            failure = EngineError(
                f"the engine did not start within engine.start_timeout_s={timeout_s:g} seconds; raise it if "
                f"{self.log_path} shows that it was still loading"
            )
            self.end()
            raise failure from None
        except BaseException:
            self.end()
            raise

    def call(self, operation: str, **payload: Any) -> Future:
        """Ask for one operation of host.py."""
        number = next(self._numbers)
        future = self._expect(number)
        if self._failure is None and self._channel is not None:
            try:
                self._channel.send((number, operation, payload))
            except OSError:
                self._fail()
        return future

    def alive(self) -> bool:
        return self._failure is None and self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End every process of the engine's session and wait for it. Safe at any time and more than once."""
        process = self._process
        with self._lock:
            if self._failure is None:
                self._failure = EngineError("the engine was shut down")
        if process is None:
            return
        # Not reaped yet, so the number still names our process group: nothing else can be hit.
        if process.returncode is None:
            _kill_group(process.pid)
            process.wait()
        _wait_for_group(process.pid)
        if self._channel is not None:
            self._channel.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_END_TIMEOUT_S)
        self._fail_pending()

    # The owning thread --------------------------------------------------------------------------------------------

    def _own(self, launched: queue.Queue) -> None:
        try:
            self._launch()
        except OSError as error:
            launched.put(error)
            return
        launched.put(None)
        while True:
            try:
                number, good, value = self._channel.receive()
            except (EOFError, OSError):
                break
            self._resolve(number, good, value)
        self._fail()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_size(self.log_path)
        with theirs, open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orbit_cli.engine.host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=self.environment,
            )
        self._channel = Channel(ours)

    def _expect(self, number: int) -> Future:
        future: Future = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                self._pending[number] = future
        return future

    def _resolve(self, number: int, good: bool, value: Any) -> None:
        with self._lock:
            future = self._pending.pop(number, None)
        if future is None:
            return
        try:
            if good:
                future.set_result(value)
            else:
                future.set_exception(value if isinstance(value, OrbitError) else EngineError(str(value)))
        except InvalidStateError:
            pass  # the caller gave up on it

    def _fail(self) -> None:
        """The process is gone: wait for its end, then fail everything that waits, with what its log says it died of."""
        deadline = time.monotonic() + 5.0
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            if self._failure is None:
                self._failure = EngineError(f"the engine {self._end()}; its log is {self.log_path}")
        if self._process.returncode is None:
            _kill_group(self._process.pid)
        self._fail_pending()

    def _end(self) -> str:
        """How the process ended, as the end of "the engine ..."."""
        happened = "stopped" if self._ready is not None and self._ready.done() else "did not start"
        code = self._process.returncode
        # SGLang kills its own processes when one of them fails, so the exit code alone says little.
        cause = last_exception(self.log_path, self._log_start)
        if cause is None:
            how = f"exit code {code}" if code is not None else "it closed its channel"
            cause = f"{how}, with no exception in its log; a process that was killed may have run out of memory"
        return f"{happened}: {cause}"

    def _fail_pending(self) -> None:
        with self._lock:
            waiting, self._pending = list(self._pending.values()), {}
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _wait_for_group(leader: int) -> None:
    """Until no process of the group is left; all of them were signalled, this only waits."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)
