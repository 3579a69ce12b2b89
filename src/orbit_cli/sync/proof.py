"""The proof behind `orbit sync-test`: base, random adapters, and swaps with requests in flight, each held to its gate.

Given a running engine and a trainer model it makes a list of checks with figures. It decides nothing else: the command
prints the table and turns a failed check into exit code 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.schema.system import Inject, SyncConfig
from orbit_cli.sync.parity import NOISE_FLOOR, Probe, Probes, moved
from orbit_cli.types import AdapterVersion, SampleRequest, SamplingParams, SwapReceipt


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the table."""

    name: str
    passed: bool
    gap_mean: float | None = None  # mean |log-prob difference|, nats
    gap_max: float | None = None
    moved: float | None = None  # how far the adapter moved the trainer's log-probs from the base's
    milliseconds: float | None = None
    nbytes: int | None = None
    cause: str = ""  # why it failed


class Proof:
    """Runs the checks one by one; `checks` grows as it goes."""

    def __init__(
        self,
        probes: Probes,
        config: SyncConfig,
        inject: Inject = Inject.none,
        scale: float = 0.05,
    ) -> None:
        """`scale`: standard deviation of the random adapters' parameters. `inject`: withhold or wrong_version."""
        self._probes = probes
        self._engine, self._model, self._tokens = probes.engine, probes.model, probes.tokens
        self._config = config
        self._inject = inject
        self._scale = scale
        self._number = 0
        self._base_probe: Probe | None = None
        self.checks: list[Check] = []

    def run(self, trainer_base: str, engine_base: str) -> list[Check]:
        """All checks. The two arguments are the checksums of the base files that each side loaded."""
        self._same_files(trainer_base, engine_base)
        before = self._engine.base_checksum()
        base = self._base("base, adapter off")
        self._base_probe = base
        self._swap("random adapter")
        self._in_flight()
        again = self._base("base again, after the swaps")
        drift = moved(base.engine, again.engine)
        self.checks.append(
            Check(
                name="base unmoved by the swaps",
                passed=drift <= NOISE_FLOOR,
                moved=drift,
                cause=""
                if drift <= NOISE_FLOOR
                else f"the base's log-probs moved by {drift:.2e} although it is frozen",
            )
        )
        after = self._engine.base_checksum()
        self.checks.append(
            Check(
                name="checksum of the base in the engine",
                passed=before == after,
                cause="" if before == after else "the engine's base weights changed in memory during the test",
            )
        )
        return self.checks

    def _same_files(self, ours: str, theirs: str) -> None:
        same = ours == theirs
        cause = f"the base was altered: the trainer's files hash to {ours[:12]}, the engine's to {theirs[:12]}"
        self.checks.append(Check(name="same base files", passed=same, cause="" if same else cause))

    def _base(self, name: str) -> Probe:
        scored = self._probes.score(None)
        self._judge(name, scored)
        return scored

    def _judge(
        self, name: str, scored: Probe, movement: float | None = None, receipt: SwapReceipt | None = None
    ) -> None:
        cause = self._probes.beyond(scored)
        self.checks.append(
            Check(
                name=name,
                passed=not cause,
                gap_mean=scored.gap_mean,
                gap_max=scored.gap_max,
                moved=movement,
                milliseconds=receipt.milliseconds if receipt else None,
                nbytes=receipt.nbytes if receipt else None,
                cause=cause,
            )
        )

    def _next_version(self) -> AdapterVersion:
        self._number += 1
        self._model.bank.randomize(seed=self._number, scale=self._scale)
        self._model.bank.materialize()
        return self._model.bank.version(self._number)

    def _deliver(self, version: AdapterVersion) -> SwapReceipt | None:
        """Publish, or break the delivery as `inject` says. None: nothing was sent."""
        if self._inject is Inject.withhold and version.number > 1:
            return None
        if self._inject is Inject.wrong_version and version.number > 1:
            # The newest tensors under the name of the next version: what is asked for by name is not what arrives.
            late = AdapterVersion(
                number=version.number + 1000, spec=version.spec, tensors=version.tensors, checksum=version.checksum
            )
            return self._engine.publish(late)
        return self._engine.publish(version)

    def _swap(self, name: str) -> None:
        version = self._next_version()
        receipt = self._deliver(version)
        if not self._arrived(name, version, receipt):
            return
        scored = self._probes.score(version.number)
        movement = moved(self._base_probe.trainer, scored.trainer)
        self._judge(name, scored, movement, receipt)
        theirs, cause = moved(self._base_probe.engine, scored.engine), ""
        acted = self._probes.effect(self._base_probe, scored)
        if acted is not None and not acted.sound(self._config.movement_share):
            cause = acted.told()
        if movement > NOISE_FLOOR and theirs < self._config.movement_share * movement:
            cause = (
                f"the trainer's log-probs moved by {movement:.2e}, the engine's by {theirs:.2e}: "
                "the adapter never took effect"
            )
        if cause:
            self.checks.append(
                Check(
                    name=f"{name} took effect",
                    passed=False,
                    moved=theirs,
                    cause=cause,
                )
            )

    def _arrived(self, name: str, version: AdapterVersion, receipt: SwapReceipt | None) -> bool:
        cause = ""
        if version.number not in self._engine.versions():
            what = "nothing was delivered" if receipt is None else f"the engine filed it as version {receipt.version}"
            cause = f"version {version.number} is not in the engine ({what}); it serves {self._engine.versions()}"
        elif receipt is None or receipt.checksum != version.checksum:
            cause = f"version {version.number} arrived altered"
        if cause:
            self.checks.append(Check(name=name, passed=False, cause=cause))
        return not cause

    def _in_flight(self) -> None:
        """Swap while requests run on the old version: they must finish on it, and new ones must start on the new."""
        for swap in range(self._config.swaps):
            old = self._number
            pending = [self._engine.submit(self._request(line, old, seed)) for seed, line in enumerate(self._tokens)]
            self._swap(f"swap {swap + 1}, {len(pending)} requests in flight")
            wrong = sum(set(future.result().versions) != {old} for future in pending)
            self.checks.append(
                Check(
                    name=f"swap {swap + 1}: requests in flight stayed on version {old}",
                    passed=wrong == 0,
                    cause="" if wrong == 0 else f"{wrong} of {len(pending)} requests changed their version on the way",
                )
            )
            if not all(check.passed for check in self.checks):
                return
            fresh = self._engine.generate([self._request(self._tokens[0], self._number, 0)])[0]
            right = set(fresh.versions) == {self._number}
            cause = f"a new request for version {self._number} was served by {sorted(set(map(str, fresh.versions)))}"
            self.checks.append(
                Check(
                    name=f"swap {swap + 1}: new requests on version {self._number}",
                    passed=right,
                    cause="" if right else cause,
                )
            )
            self._engine.retire()

    def _request(self, line: list[int], version: int, seed: int) -> SampleRequest:
        return SampleRequest(
            token_ids=line,
            params=SamplingParams(max_new_tokens=self._config.flight_tokens, temperature=1.0),
            version=version,
            seed=seed,
        )
