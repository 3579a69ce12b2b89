"""Do trainer and engine compute the same thing? The same fixed tokens are scored by both.

The engine's log-probs come through its prefill path at temperature 1; the trainer's from the same token ids. What they
may differ by is the rounding of two orders of summation, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from orbit_cli.config.schema.base import ComputeDtype
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.engine.protocol import RolloutEngine
from orbit_cli.models.build import TrainerModel

# Below this mean movement of the trainer's log-probs (nats) rounding alone can hide or feign a movement.
NOISE_FLOOR = 1e-6
# From so many times the base's gap on, root mean squares, an adapter's movement is compared. An adapted model may round
# four times as much as its base (docs/log.md); the slope is then still above 0.8.
LOUD = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """What rounding of the activations may do to log-probs."""

    limit: float  # of the mean |log-prob gap|, nats
    outliers: float  # share of the probes' gaps, the largest, that their mean leaves out


# In float32 a sound run of SmolLM2-135M has gaps of up to 4e-6. In bfloat16 the same model, against itself in float32,
# has means of up to 0.10 on its probes beside single gaps of more than 2 nats, which lift the mean to 0.19 and say
# nothing of a fault: a wrong base or adapter moves them all (docs/benchmarks.md).
TOLERANCES = {
    ComputeDtype.float32: Tolerance(limit=0.01, outliers=0.0),
    ComputeDtype.bfloat16: Tolerance(limit=0.2, outliers=0.125),
}


def tolerance(config: OrbitConfig) -> Tolerance:
    """Of the run's activations; sync.max_mean_gap takes the place of its limit."""
    own, wanted = TOLERANCES[config.activations], config.sync.max_mean_gap
    return own if wanted is None else replace(own, limit=wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Log-probs of the fixed probe tokens on both sides, flattened [N]."""

    engine: torch.Tensor  # float64
    trainer: torch.Tensor  # float64

    @property
    def gap_mean(self) -> float:
        return float((self.engine - self.trainer).abs().mean())

    @property
    def gap_max(self) -> float:
        return float((self.engine - self.trainer).abs().max())

    def gap_within(self, outliers: float) -> float:
        """The mean gap without this share of the gaps, the largest; infinite if one of all is no number, or none is."""
        ordered = (self.engine - self.trainer).abs().sort().values
        if not len(ordered) or not ordered.isfinite().all():
            return float("inf")
        return float(ordered[: len(ordered) - int(outliers * len(ordered))].mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What a version does to the probes, in the engine beside the trainer."""

    moved: float  # root mean square of what the trainer's log-probs moved since the base, nats
    share: float  # of this movement that the engine's shows: 1 is the same, 0 none of it, -1 the opposite

    def sound(self, least: float) -> bool:
        return least <= self.share <= 1 / least

    def told(self) -> str:
        return (
            f"of what the adapter moves the trainer's log-probs on the probe prompts ({self.moved:.2g} nats) the "
            f"engine's show {self.share:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Probes:
    """The two sides, the fixed texts that both score, and what rounding may do to the scores."""

    engine: RolloutEngine
    model: TrainerModel
    tokens: list[list[int]]
    tolerance: Tolerance

    def score(self, version: int | None) -> Probe:
        """Both sides with `version` (None: the base, adapters off in the trainer)."""
        served = [value for row in self.engine.score(self.tokens, version) for value in row]
        return Probe(
            engine=torch.tensor(served, dtype=torch.float64),
            trainer=trainer_scores(self.model, self.tokens, adapter=version is not None),
        )

    def gap(self, scored: Probe) -> float:
        """What `beyond` judges, nats."""
        return scored.gap_within(self.tolerance.outliers)

    def beyond(self, scored: Probe) -> str:
        """Why the gap is larger than rounding explains; empty if it is not."""
        gap, limit = self.gap(scored), self.tolerance.limit
        return "" if gap <= limit else f"mean |log-prob gap| {gap:.4f} is above {limit:g} (sync.max_mean_gap)"

    def effect(self, base: Probe, scored: Probe) -> Effect | None:
        """The least-squares slope of the engine's movement since the base on the trainer's; None if too little moved.

        Rounding of the two sides is unrelated, so over all tokens it averages out of the slope: a missing, reversed or
        wrongly scaled adapter shows long before the gap leaves what rounding explains. Left out are the tokens that
        round most in the base, as many as the tolerance says.
        """
        gaps = (base.engine - base.trainer).abs()
        kept = gaps.argsort()[: len(gaps) - int(self.tolerance.outliers * len(gaps))]
        ours, theirs = (scored.trainer - base.trainer)[kept], (scored.engine - base.engine)[kept]
        noise = gaps[kept].square().mean().sqrt()
        moved = float(ours.square().mean().sqrt())
        if not moved > NOISE_FLOOR + LOUD * float(noise):
            return None
        return Effect(moved=moved, share=float((ours * theirs).sum() / ours.square().sum()))


@torch.no_grad()
def trainer_scores(model: TrainerModel, tokens: list[list[int]], adapter: bool) -> torch.Tensor:
    """Log-probs of tokens 1.. of each row at temperature 1, flattened [N], float64."""
    width = max(map(len, tokens))
    ids = torch.zeros((len(tokens), width), dtype=torch.long)
    mask = torch.zeros((len(tokens), width), dtype=torch.bool)
    for row, line in enumerate(tokens):
        ids[row, : len(line)] = torch.tensor(line)
        mask[row, 1 : len(line)] = True
    lengths = torch.tensor([len(line) for line in tokens])

    def score() -> torch.Tensor:
        return model.logprobs(ids, lengths, mask, temperature=1.0, chunk=256, with_entropy=False)[0]

    if adapter:
        values = score()
    else:
        with model.disabled():
            values = score()
    return values.cpu()[mask].double()


def moved(before: torch.Tensor, after: torch.Tensor) -> float:
    """Mean |difference| between two scorings of the same tokens."""
    return float((after - before).abs().mean())
