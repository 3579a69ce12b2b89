"""What runs inside a grader's worker process: `python -m orbit_cli.rewards.worker FD` (see `pool.py`).

First message: (RewardConfig, TaskSpec or None); reply: None, or a sentence that says why there is no scorer. Then one
request (response, prompt, timeout) at a time; reply: a Score, or what was raised.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from orbit_cli.errors import ConfigError
from orbit_cli.rewards.score import Score, Scorer
from orbit_cli.rewards.scorers import build_scorer
from orbit_cli.types import Prompt

GRACE_S = 5.0  # the parent kills at the timeout; the alarm is for when it is no longer there


def serve(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    config, task = connection.recv()
    try:
        scorer = build_scorer(config, task)
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            response, prompt, timeout_s = connection.recv()
        except (EOFError, ConnectionResetError):  # the run is over, or was killed
            return
        connection.send(_score(scorer, response, prompt, timeout_s))


def _score(scorer: Scorer, response: str, prompt: Prompt, timeout_s: float) -> Score | str:
    # The default action of SIGALRM ends the process even where Python code never runs again.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
    try:
        return scorer(response, prompt)
    except Exception as error:  # foreign code: whatever it raises is reported as a failed grade
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
