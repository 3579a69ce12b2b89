"""Mirrors the run to Weights & Biases from a thread of its own. Nothing it does can stop, slow or change a run.

The run's thread only puts rows on a queue; importing wandb, its start, and every call happen in the mirror's thread,
and every exception there is caught and counted. Each kind of row has its own step axis (`train/step`, `eval/step`),
declared with define_metric and never passed as wandb's global step, which drops rows that seem to go back
(https://github.com/wandb/wandb/issues/5632).
"""

from __future__ import annotations

import queue
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from orbit_cli.config.schema.system import LoggingConfig
from orbit_cli.telemetry.files import write_atomic
from orbit_cli.telemetry.names import KINDS
from orbit_cli.telemetry.run_folder import RunFolder

CLOSE_TIMEOUT_S = 20.0  # how long the end of a run waits for the mirror; then it is left behind
MAX_QUEUED = 10_000  # rows kept while W&B does not answer; later ones are dropped here, never in metrics.jsonl
SECRET = re.compile(r"api_?key|secret|passw(or)?d|credential|auth(orization)?$|(^|_)token$", re.IGNORECASE)
REDACTED = "(redacted)"


class WandbMirror:
    """One mirrored run. `problem` says what went wrong, if anything did."""

    def __init__(
        self, config: LoggingConfig, folder: RunFolder, plain: Mapping[str, Any], wandb_id: str | None = None
    ) -> None:
        """`plain`: the resolved config. The id is taken from the argument, the run folder, or made anew."""
        known = folder.wandb_id.read_text().strip() if folder.wandb_id.is_file() else None
        self.id = wandb_id or known or secrets.token_hex(4)
        write_atomic(folder.wandb_id, self.id + "\n")
        self.failures = 0
        self.problem: str | None = None
        self._config, self._folder, self._plain = config, folder, redact(plain)
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=MAX_QUEUED)
        # A daemon: it holds no file of the run, and a W&B that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="wandb-mirror", daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """Mirror one row of metrics.jsonl. Returns at once."""
        self._put("log", dict(row))

    def summary(self, figures: Mapping[str, Any]) -> None:
        """Put the final figures into the run's summary. Returns at once."""
        self._put("summary", dict(figures))

    def close(self, *, failed: bool = False, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Finish the W&B run, waiting for it at most `timeout` seconds."""
        self._put("finish", 1 if failed else 0)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._failed(f"it did not finish within {timeout:.0f} s")

    def _put(self, what: str, value: Any) -> None:
        try:
            self._queue.put_nowait((what, value))
        except queue.Full:
            self._failed(f"it does not take rows; more than {MAX_QUEUED} are waiting")

    def _work(self) -> None:
        """The mirror's thread: consumes the queue until "finish"; woken by each put."""
        run = self._start()
        while True:
            what, value = self._queue.get()
            if run is not None:
                self._carry_out(run, what, value)
            if what == "finish":
                return

    def _start(self) -> Any | None:
        try:
            import wandb  # seconds to import, so not on the run's thread

            run = wandb.init(
                mode=self._config.wandb.value,
                project=self._config.project,
                entity=self._config.entity,
                tags=self._config.tags,
                name=self._folder.path.name,
                id=self.id,
                resume="allow",
                dir=str(self._folder.path),
                config=self._plain,
                settings=wandb.Settings(silent=True, console="off", disable_git=True, init_timeout=CLOSE_TIMEOUT_S - 2),
            )
            for kind in KINDS:
                run.define_metric(f"{kind}/step")
                run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        except Exception as error:  # an absent key, network or disk is W&B's business, not the run's
            self._failed(f"it could not start: {_first_line(error)}")
            return None
        return run

    def _carry_out(self, run: Any, what: str, value: Any) -> None:
        try:
            if what == "log":
                kind = value["kind"]
                shown = {key: v for key, v in value.items() if key not in ("kind", "time") and v is not None}
                run.log({f"{kind}/{key}": v for key, v in shown.items()})
            elif what == "summary":
                run.summary.update(value)
            else:
                run.finish(exit_code=value)
        except Exception as error:  # as above: counted, told at the end, never raised
            self._failed(f"a call failed: {_first_line(error)}")

    def _failed(self, problem: str) -> None:
        self.failures += 1
        self.problem = self.problem or problem


def redact(value: Any) -> Any:
    """The same nested data with the values of secret-looking keys replaced."""
    if isinstance(value, Mapping):
        return {k: REDACTED if SECRET.search(str(k)) and v else redact(v) for k, v in value.items()}
    return [redact(item) for item in value] if isinstance(value, list) else value


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
