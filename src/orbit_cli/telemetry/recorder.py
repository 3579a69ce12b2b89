"""The one object through which a run records itself: metrics, samples, receipts, memory, console and the W&B mirror.

Everything it is told is on disk before it returns. It steers nothing: what to train, evaluate or keep is decided by its
callers, and nothing that a mirror does reaches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.system import WandbMode
from orbit_cli.config.serialize import to_plain
from orbit_cli.telemetry.console import RunConsole
from orbit_cli.telemetry.files import write_json
from orbit_cli.telemetry.memory import MemoryRecorder, rss_gib
from orbit_cli.telemetry.metrics import JsonLines, MetricsWriter, read_rows
from orbit_cli.telemetry.receipts import AdaptedRow, receipts
from orbit_cli.telemetry.report import figures
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.telemetry.wandb_mirror import WandbMirror
from orbit_cli.types import EvalResult, Trajectory

LAYERS_ABOUT = (
    "decoder layers in order; milliseconds over the micro-batches of one early step, recomputation counted as "
    "backward; MiB kept from forward to backward by the largest micro-batch, base and adapter not among them; "
    "experts_*: of these, routed experts"
)


class Recorder:
    """Records one run; a context manager, so that files are closed and the terminal is given back.

    >>> with Recorder(folder, config) as recorder:
    ...     recorder.open(0)
    ...     with recorder.phase("rollout"):
    ...         ...
    ...     recorder.step(1, {"reward_mean": 0.2}, trajectories)
    """

    def __init__(self, folder: RunFolder, config: OrbitConfig) -> None:
        self.folder = folder
        self._config = config
        self._console = RunConsole(config.logging.console, config.trainer.steps)
        self._memory = MemoryRecorder(folder.memory)
        self._mirror: WandbMirror | None = None
        self._metrics: MetricsWriter | None = None
        self._samples: JsonLines | None = None
        self._seconds: dict[str, float] = {}  # phase -> seconds since the last row that took them
        self._sampled = 0
        self._layers_written = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._console)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mirror is not None:
            self._mirror.summary(figures(self.folder.path))
            self._mirror.close(failed=error is not None)
            if self._mirror.problem:
                self.notify(f"W&B: {self._mirror.problem}; the run folder has everything")
        self._stack.close()

    # What there is to know before and between steps

    def open(self, step: int, wandb_id: str | None = None) -> None:
        """Training goes on after `step` finished steps (0: from the start): rows of later steps are dropped, and their
        adapters (step N made version N) set aside, or the newest would be one that this run did not end with."""
        self.folder.set_aside_adapters(step)
        self._open(step)
        if self._config.logging.wandb is not WandbMode.off:
            self._mirror = WandbMirror(self._config.logging, self.folder, to_plain(self._config), wandb_id)
        self._console.start(step)

    def receipts(self, adapted: Sequence[AdaptedRow], facts: Sequence[tuple[str, str]]) -> None:
        """What the run is about to do: printed, and kept in receipts.json."""
        made = receipts(self._config, run=self.folder.path, adapted=adapted, facts=facts)
        made.save(self.folder.receipts)
        self._console.receipts(made.lines())

    def planned(self, peaks: dict[str, Any] | None) -> None:
        """Planned memory of this run, kept beside the measured; None if there is no plan."""
        self._memory.planned(peaks)

    def held(self, parts: dict[str, int]) -> None:
        """Bytes of the trainer's base, adapter and gradients, counted exactly."""
        self._memory.held(parts)

    def engine(self, gpu_memory: Callable[[], dict[str, int]]) -> None:
        """The engine runs; its GPU memory, peaks in bytes, goes beside ours from now on."""
        self._memory.engine(gpu_memory)

    def notify(self, text: str) -> None:
        """A line for the person who watches."""
        self._console.note(text)

    def turn(self, count: int) -> None:
        """`count` more samples have ended a turn."""
        self._sampled += count
        self._console.phase(f"rollout {self._sampled}")

    def progress(self, phase: str, done: int, total: int, tokens: int, seconds: float) -> None:
        """Progress of a job that has no training steps; `tokens` were sampled in `seconds`."""
        self._console.progress(phase, done, total, tokens / max(seconds, 1e-9))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and peak memory of a phase; the time goes into the next row as `NAME_seconds`."""
        self._console.phase(name)
        self._sampled = 0
        started = time.perf_counter()
        with self._memory.phase(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    # Rows

    def step(self, step: int, metrics: Mapping[str, float], trajectories: list[Trajectory]) -> None:
        """Training step number `step` (from 1) is done."""
        seconds = {f"{name}_seconds": self._seconds.pop(name, 0.0) for name in ("rollout", "train", "sync")}
        row: dict[str, float | None] = {**metrics, **seconds, "step_seconds": sum(seconds.values())}
        row["rollout_tokens_per_second"] = _rate(metrics.get("rollout_tokens", 0.0), seconds["rollout_seconds"])
        row["train_tokens_per_second"] = _rate(metrics.get("computed_tokens", 0.0), seconds["train_seconds"])
        row["rss_gib"] = rss_gib()
        self._write_samples(step, trajectories)
        self.record("train", step, row)

    def layers(self, record: Mapping[str, Any] | None) -> None:
        """What each layer cost in an early step, as trainer/layer_meter.py measured it, if it has; written once."""
        if record is not None and not self._layers_written:
            self._layers_written = True
            write_json(self.folder.layers, {"about": LAYERS_ABOUT, **record})
            rows = record["layers"]
            parts = [_cost(rows, part) for part in ("", "experts_") if any(part + "kept_mib" in row for row in rows)]
            self.notify(f"a layer in the mean, {record['tokens']} tokens: " + "; ".join(parts))

    def evaluation(self, step: int, result: EvalResult, policy: str | None = None) -> None:
        """An evaluation after `step` steps; `policy` names what was evaluated where that is not the run's adapter."""
        row = {**result.metrics, "eval_seconds": self._seconds.pop("eval", 0.0)}
        self.record("eval", step, row, policy)

    def record(self, kind: str, step: int, metrics: Mapping[str, float | None], policy: str | None = None) -> None:
        """Write one row of metrics.jsonl and show it."""
        if self._metrics is None:
            self._open(None)
        assert self._metrics is not None
        if kind == "sync":
            self._seconds.pop("sync", None)  # the publisher's own figure is in `metrics`
        row = self._metrics.write(kind, step, metrics, policy)
        self._console.row(row)
        if self._mirror is not None:
            self._mirror.log(row)

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` steps is on record (a resumed run does not repeat it)."""
        return any(row["kind"] == "eval" and row["step"] == step for row in read_rows(self.folder.metrics))

    # What is kept besides rows

    @property
    def wandb_id(self) -> str | None:
        """Id of the W&B run, for the checkpoint."""
        return self._mirror.id if self._mirror is not None else None

    def _open(self, resume_step: int | None) -> None:
        self._metrics = self._stack.enter_context(MetricsWriter(self.folder.metrics, resume_step=resume_step))
        self._samples = self._stack.enter_context(JsonLines(self.folder.samples, resume_step=resume_step))

    def _write_samples(self, step: int, trajectories: list[Trajectory]) -> None:
        assert self._samples is not None, "open comes before the first step"
        wanted = min(self._config.logging.samples_per_step, len(trajectories))
        for index in range(wanted):
            chosen = trajectories[index * len(trajectories) // wanted]  # evenly over the groups
            self._samples.row(
                {
                    "step": step,
                    "prompt_id": chosen.prompt_id,
                    "prompt": chosen.prompt_text,
                    "text": chosen.text,
                    "reward": chosen.reward,
                    "reward_parts": chosen.reward_parts,
                    "correct": chosen.correct,
                    "answer": chosen.answer,
                    "reference": chosen.reference,
                    "tokens": chosen.response_tokens,
                    "finish_reason": str(chosen.finish_reason),
                    "error": chosen.error,
                }
            )


def _cost(rows: Sequence[Mapping[str, float]], part: str) -> str:
    """One line on a layer, or on the experts of those that have some, in the mean."""
    having = [row for row in rows if part + "kept_mib" in row]
    forward, backward, kept = (
        sum(row[part + name] for row in having) / len(having) for name in ("forward_ms", "backward_ms", "kept_mib")
    )
    where = "experts alone " if part else ""
    return f"{where}{forward:.1f} ms forward, {backward:.1f} ms backward, {kept:.1f} MiB kept"


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
