"""Worker processes that can be killed, for scorers that may hang.

Processes, not threads: a regular expression that hangs in one thread holds up the whole interpreter, and a thread
cannot be killed. Started with subprocess, not fork (unsafe beside threads) nor multiprocessing (re-imports the
caller's main module). A worker that exceeds its time is killed with its children and replaced at the next call. What
it waits for: one request at a time on a socket pair. What ends it: the socket's end, so that it cannot outlive the
run, and should it hang just then, an alarm set before every request.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

from orbit_cli.errors import ConfigError
from orbit_cli.rewards.score import GradeFailure, Score
from orbit_cli.types import Prompt

START_TIMEOUT_S = 180.0  # imports of sympy, reasoning-gym or the user's module on a busy machine


class Worker:
    """One process. Not thread-safe: the pool hands it to one caller at a time."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        self._connection, theirs = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orbit_cli.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a grader prints must not mix with this process's output
            start_new_session=True,  # Ctrl-C is for the run, which still needs its grader to finish the step
        )
        theirs.close()
        self._ready = False
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection)
        with contextlib.suppress(OSError):  # a worker that died already is reported by the first call
            self._connection.send(setup)

    def wait_until_ready(self) -> None:
        """Raises ConfigError if the scorer cannot be built there, EOFError or OSError if the process failed."""
        if self._ready:
            return
        try:
            problem = self._receive(START_TIMEOUT_S)
        except TimeoutError as error:
            raise OSError(f"no answer within {START_TIMEOUT_S:g} s") from error
        if problem is not None:
            raise ConfigError(problem)
        self._ready = True

    def ask(self, response: str, prompt: Prompt, timeout_s: float) -> Score | str:
        """The score, or what the scorer raised. Raises TimeoutError, EOFError or OSError if the worker is lost."""
        self.wait_until_ready()
        self._connection.send((response, prompt, timeout_s))
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        return self._connection.recv()

    def kill(self) -> None:
        """End the process and its children."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the worker leads its own session
    process.wait()


class WorkerPool:
    """Up to `size` workers with the same scorer, each started when first needed (the first at once)."""

    def __init__(self, setup: tuple[Any, ...], size: int, timeout_s: float) -> None:
        self._setup, self._timeout_s, self._closed = setup, timeout_s, False
        # Last in, first out: a warm worker is reused before another is started.
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(size - 1):
            self._idle.put(None)
        self._idle.put(Worker(setup))

    def check(self) -> None:
        """Wait for the first worker. Raises ConfigError if the scorer cannot be built."""
        worker = self._idle.get()
        try:
            worker = worker or Worker(self._setup)
            worker.wait_until_ready()
        except (EOFError, OSError) as error:
            worker = _replace(worker)
            raise ConfigError("the process of environment.reward died while loading; its output says why") from error
        finally:
            self._idle.put(worker)

    def score(self, response: str, prompt: Prompt) -> Score:
        """Score in a worker; waits for a free one. Safe from any thread.

        Raises:
            GradeFailure: the scorer raised, its process died, the pool is closed, or it took longer than the limit
                (waiting for a free worker and for its start do not count).
        """
        worker = self._idle.get()
        try:
            if self._closed:
                raise GradeFailure("the grader is closed")
            worker = worker or Worker(self._setup)
            reply = worker.ask(response, prompt, self._timeout_s)
        except TimeoutError as error:
            worker = _replace(worker)
            raise GradeFailure(f"the grader took longer than {self._timeout_s:g} s and was stopped") from error
        except (EOFError, OSError) as error:
            worker = _replace(worker)
            raise GradeFailure("the grader's process died or could not be started") from error
        finally:
            self._idle.put(_replace(worker) if self._closed else worker)
        if isinstance(reply, str):
            raise GradeFailure(reply)
        return reply

    def close(self) -> None:
        """Stop all workers, busy ones as soon as they answer; later calls fail."""
        self._closed = True
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for worker in idle:
            self._idle.put(_replace(worker))


def _replace(worker: Worker | None) -> None:
    """Kill a worker; the None in its place starts a new one when needed."""
    if worker is not None:
        worker.kill()
