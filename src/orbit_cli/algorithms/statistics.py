"""Statistics of an evaluation: accuracy, avg@k, unbiased pass@k, maj@k, and bootstrap intervals over prompts.

numpy only. One prompt is one observation: its samples share the question, so intervals resample prompts, not samples.
Samples that could not be graded (None) are left out and counted, never taken as wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLE_ENTRIES = 1 << 22  # prompts * resamples drawn at once: bounds the bootstrap's memory to tens of megabytes


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its bootstrap percentile interval."""

    mean: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Statistics of one evaluated data set."""

    accuracy: Interval  # share of correct samples, averaged over prompts; equals pass@1 and avg@k
    pass_at: dict[int, Interval]
    majority: Interval  # maj@n over all graded samples of a prompt
    prompts: int  # prompts with at least one graded sample
    ungraded: int  # samples without an outcome


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased probability that one of k samples is right: 1 - C(n-c, k) / C(n, k). Codex, 2107.03374.

    Raises:
        ValueError: k is not in 1..samples, or correct is not in 0..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples and k of at least 1; there are {samples} samples")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples is impossible")
    wrong = samples - correct
    if wrong < k:
        return 1.0
    # C(n-c, k) / C(n, k) as a product: no factorials, no overflow at any n.
    factors = 1.0 - k / np.arange(wrong + 1, samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(factors))


def average_at_k(correct: Sequence[bool]) -> float:
    """Share of correct samples of one prompt (avg@k)."""
    return float(np.mean(np.asarray(correct, dtype=np.float64)))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer of one prompt is right (maj@k, self-consistency, 2203.11171).

    Samples without an answer do not vote. A tie counts as the expected outcome of a fair draw among the tied answers.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    right = {answer for answer, is_correct in zip(answers, correct, strict=True) if is_correct}
    top = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == top]
    return sum(answer in right for answer in tied) / len(tied)


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, seed: int, resamples: int = 2000, level: float = 0.95
) -> Interval:
    """Mean of one value per prompt with its percentile bootstrap interval (Efron 1979).

    For "before against after" pass the differences on the same prompts: the interval is then the paired one.

    Args:
        values: [P] one finite number per prompt. seed: of the resampling. level: coverage.

    Raises:
        ValueError: no values, or a value that is not finite.
    """
    x = np.asarray(values, dtype=np.float64)  # [P]
    if x.size == 0 or not np.isfinite(x).all():
        raise ValueError("a bootstrap needs at least one value, all of them finite")
    rng = np.random.default_rng(seed)
    batch = max(1, RESAMPLE_ENTRIES // x.size)
    starts = range(0, resamples, batch)
    means = np.concatenate(
        [x[rng.integers(0, x.size, (min(batch, resamples - start), x.size))].mean(axis=1) for start in starts]
    )  # [resamples]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(x.mean()), float(low), float(high), x.size)


def summarise(
    correct: Sequence[Sequence[bool | None]],
    answers: Sequence[Sequence[str | None]],
    pass_k: Sequence[int],
    seed: int,
    resamples: int = 2000,
) -> Outcomes:
    """Statistics of a data set.

    Args:
        correct: [P][n] outcome of each sample of each prompt, None where it could not be graded.
        answers: [P][n] extracted answers, for maj@k.
        pass_k: ks of pass@k; a prompt with fewer graded samples than k is left out of that k, and a k for which none is
            left out of the result.

    Raises:
        ValueError: no sample could be graded.
    """
    graded = [
        [(c, a) for c, a in zip(row, row_answers, strict=True) if c is not None]
        for row, row_answers in zip(correct, answers, strict=True)
    ]
    rows = [row for row in graded if row]
    if not rows:
        raise ValueError("none of the samples could be graded")
    counts = [(len(row), sum(c for c, _ in row)) for row in rows]
    passes = {}
    for k in pass_k:
        values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if values:
            passes[k] = bootstrap_interval(values, seed, resamples)
    return Outcomes(
        accuracy=bootstrap_interval([c / n for n, c in counts], seed, resamples),
        pass_at=passes,
        majority=bootstrap_interval(
            [majority_at_k([a for _, a in row], [c for c, _ in row]) for row in rows], seed, resamples
        ),
        prompts=len(rows),
        ungraded=sum(len(row) for row in correct) - sum(n for n, _ in counts),
    )
