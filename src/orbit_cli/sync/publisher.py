"""Publish adapter versions to the engine and prove that each arrived.

A publish is believed only when: the engine reports the checksum of what it holds and it is ours; the engine's log-probs
moved when the trainer's did; the gap between the two sides is within its limit; the base in the engine's memory hashes
to what it was (every `sync.base_checksum_every` versions, and at the end of a run). Anything else stops
the run with what was wrong.
"""

from __future__ import annotations

import time

from orbit_cli.config.schema.system import SyncConfig
from orbit_cli.errors import NotFiniteError, ParityError
from orbit_cli.sync.parity import NOISE_FLOOR, Probe, Probes, moved
from orbit_cli.types import SwapReceipt

# In bfloat16 the gap is more than a step moves. But an engine that took the step scores no probe token bit for bit as
# before where the trainer's log-probs move by this share of the gap or more.
STILL = 0.1


class Publisher:
    """Moves adapter versions from the trainer's bank into the engine's slots."""

    def __init__(self, probes: Probes, config: SyncConfig) -> None:
        self._probes = probes
        self._engine = probes.engine
        self._model = probes.model
        self._config = config
        self._base: Probe | None = None
        self._last: Probe | None = None
        self._base_checksum = self._engine.base_checksum()

    def check_base(self) -> Probe:
        """Score the base (no adapter) on both sides. Raises ParityError beyond the gap limit."""
        base = self._probes.score(None)
        if beyond := self._probes.beyond(base):
            raise ParityError(
                f"the base without adapter differs between trainer and engine: {beyond}; they do not hold the same base"
            )
        self._base = base
        return base

    def publish(self, number: int) -> dict[str, float]:
        """Ship version `number` and prove its arrival. Returns the metrics of the swap.

        Raises ParityError, and NotFiniteError before anything is sent if the adapter has NaN or infinite values.
        """
        started = time.perf_counter()
        self._model.bank.materialize()
        version = self._model.bank.version(number)
        broken = next((name for name, tensor in version.tensors.items() if not tensor.isfinite().all()), None)
        if broken is not None:
            raise NotFiniteError(
                f"{broken} of adapter version {number} has NaN or infinite values; it was not published"
            )
        receipt = self._engine.publish(version)
        self._check_receipt(receipt, number, version.checksum, len(version.tensors))
        self._engine.retire()
        scored = self._probes.score(number)
        metrics = self._check_probe(scored, number)
        every = self._config.base_checksum_every
        if every and number % every == 0:
            self.check_frozen(number)
        self._last = scored
        return {
            **metrics,
            "version": float(number),
            "swap_bytes": float(receipt.nbytes),
            "swap_milliseconds": receipt.milliseconds,
            "sync_seconds": time.perf_counter() - started,
        }

    def check_frozen(self, number: int) -> None:
        """Hash the engine's base in its memory as it is after version `number`. Raises ParityError if it changed."""
        checksum = self._engine.base_checksum()
        if checksum != self._base_checksum:
            raise ParityError(
                f"the engine's base changed: its checksum was {self._base_checksum[:12]} at the start and is "
                f"{checksum[:12]} after version {number}; the frozen base must never change"
            )

    def _check_receipt(self, receipt: SwapReceipt, number: int, checksum: str, tensors: int) -> None:
        if receipt.version != number:
            raise ParityError(f"version {number} was published but the engine reports version {receipt.version}")
        if receipt.checksum != checksum or receipt.tensors != tensors:
            raise ParityError(
                f"version {number} arrived altered: sent {tensors} tensors with checksum {checksum[:12]}, the engine "
                f"holds {receipt.tensors} with checksum {receipt.checksum[:12]}"
            )

    def _check_probe(self, scored: Probe, number: int) -> dict[str, float]:
        movement = {}
        if self._last is not None:
            ours = moved(self._last.trainer, scored.trainer)
            theirs = moved(self._last.engine, scored.engine)
            movement = {"probe_moved_trainer": ours, "probe_moved_engine": theirs}
            noise = self._last.gap_mean + scored.gap_mean
            still = theirs == 0 and ours > NOISE_FLOOR + STILL * noise
            if still or (ours > NOISE_FLOOR + noise and theirs < self._config.movement_share * ours):
                raise ParityError(
                    f"version {number} never took effect: the trainer's log-probs moved by {ours:.2e} on the probe "
                    f"prompts, the engine's by {theirs:.2e}"
                )
        acted = self._probes.effect(self._base, scored) if self._base is not None else None
        if acted is not None:
            movement["probe_effect"] = acted.share
            if not acted.sound(self._config.movement_share):
                raise ParityError(
                    f"version {number} does not do in the engine what it does in the trainer: {acted.told()}, where "
                    "about 100% is sound (sync.movement_share)"
                )
        if beyond := self._probes.beyond(scored):
            raise ParityError(f"version {number} is served differently from how it was trained: {beyond}")
        gap = self._probes.gap(scored)
        gaps = {"probe_gap_mean": scored.gap_mean, "probe_gap_judged": gap, "probe_gap_max": scored.gap_max}
        return {**movement, **gaps}
