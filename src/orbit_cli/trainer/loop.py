"""The RL loop: prompts -> groups of samples -> rewards -> advantages -> one policy-gradient step -> version N+1.

Read it from top to bottom: this is all that happens in a run. What each phase does lives behind the functions it calls;
how a session is put together is in runs/train.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.errors import NotFiniteError, ParityError
from orbit_cli.models.build import TrainerModel
from orbit_cli.sync.parity import tolerance
from orbit_cli.sync.publisher import Publisher
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.trainer.checkpoint import TrainState, save_checkpoint
from orbit_cli.trainer.interrupt import StopRequest
from orbit_cli.trainer.layer_meter import LayerMeter
from orbit_cli.trainer.step import optimise, prepare
from orbit_cli.types import EvalResult, SampledBatch


class PolicySource(Protocol):
    """The rollout side as the trainer sees it: sampled with a given adapter version, in this process or another."""

    def sample(self, step: int, cursor: int, version: int) -> SampledBatch: ...

    def evaluate(self, version: int | None) -> EvalResult: ...


@dataclass(kw_only=True, slots=True)
class Session:
    """The parts of a run, put together once by orbit_cli.runs.train."""

    config: OrbitConfig
    state: TrainState
    model: TrainerModel
    optimizer: torch.optim.Optimizer
    meter: LayerMeter
    source: PolicySource
    publisher: Publisher
    recorder: Recorder
    export: Callable[[int], None]  # put the current adapter into the run folder, under its version
    stop: StopRequest


def train_loop(session: Session) -> None:
    """Train until `trainer.steps` steps are done or a stop is asked for. Every finished step is on disk."""
    config, state, recorder = session.config, session.state, session.recorder
    with recorder.phase("sync"):
        session.publisher.check_base()
        swap = session.publisher.publish(state.version)
    recorder.record("sync", state.step, swap)

    while True:
        if not session.stop.requested and _evaluation_due(session):
            evaluate(session)
        if state.step >= config.trainer.steps or session.stop.requested:
            break

        with recorder.phase("rollout"):
            batch = session.source.sample(state.step, state.cursor, state.version)
        with recorder.phase("train"):
            prepared = prepare(batch.trajectories, config)
            with session.meter.step(), finite(session, state.step + 1):
                learned = optimise(session.model, session.optimizer, prepared, config, state.step)
            check_gap(learned, config)
        state.step += 1
        state.version += 1
        state.cursor = batch.cursor
        with recorder.phase("sync"), finite(session, state.step):
            swap = session.publisher.publish(state.version)
        metrics = {**batch.metrics, **learned, **swap, **session.model.bank.health()}
        recorder.step(state.step, metrics, batch.trajectories)
        recorder.layers(session.meter.record)
        if _checkpoint_due(session):
            checkpoint(session)

    session.meter.finish()
    recorder.layers(session.meter.record)
    if session.stop.requested:
        checkpoint(session)


def check_gap(learned: dict[str, float], config: OrbitConfig) -> None:
    """The engine's log-probs of what it just sampled against the trainer's. Raises ParityError beyond the limit."""
    gap, limit = learned.get("logprob_gap_mean", 0.0), tolerance(config).limit
    if gap > limit:
        raise ParityError(
            f"mean |log-prob gap| of this batch is {gap:.4f}, above {limit:g} (sync.max_mean_gap): what was sampled is "
            "not what is trained; the step was not kept"
        )


@contextmanager
def finite(session: Session, step: int) -> Iterator[None]:
    """Says of training step `step` why gradients or adapter are no numbers any more. Raises NotFiniteError."""
    try:
        yield
    except NotFiniteError as error:
        rate = session.config.trainer.learning_rate
        norm = float(torch.stack([p.detach().norm() for p in session.model.bank.parameters()]).norm())
        raise NotFiniteError(
            f"step {step} of training cannot go on: {error}; the adapter's norm is {norm:.3g}, and "
            f"trainer.learning_rate={rate:g} is the likely cause: set a lower one, for example {min(rate / 10, 1e-4):g}"
        ) from error


def evaluate(session: Session) -> EvalResult:
    """Evaluate the current version on held-out prompts and export its adapter."""
    with session.recorder.phase("eval"):
        result = session.source.evaluate(session.state.version)
    session.export(session.state.version)  # before the row, which says to a resumed run that both are done
    session.recorder.evaluation(session.state.step, result)
    return result


def _evaluation_due(session: Session) -> bool:
    step, every, steps = session.state.step, session.config.evaluation.every, session.config.trainer.steps
    if session.config.evaluation.prompts == 0 or session.recorder.evaluated(step):
        return False
    return step in (0, steps) or (every > 0 and step % every == 0)


def _checkpoint_due(session: Session) -> bool:
    step, every, steps = session.state.step, session.config.trainer.checkpoint_every, session.config.trainer.steps
    return step == steps or (every > 0 and step % every == 0)


def checkpoint(session: Session) -> None:
    """Put the run on disk as it is after `state.step` steps."""
    session.state.wandb_id = session.recorder.wandb_id
    save_checkpoint(
        session.recorder.folder.checkpoints,
        session.state,
        session.model.bank.named_state(),
        session.optimizer.state_dict(),
        session.config.trainer.keep_checkpoints,
    )
