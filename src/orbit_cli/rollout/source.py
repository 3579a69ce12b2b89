"""Which prompts run next, and which groups are worth training on: the rollout side of a step.

Synchronous: a step's samples all come from the version that the trainer names. Nothing here knows the trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from orbit_cli.algorithms.shaping import informative_groups
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.engine.protocol import RolloutEngine
from orbit_cli.environments.protocol import Environment
from orbit_cli.rollout.evaluate import evaluate_version
from orbit_cli.rollout.generator import Generator
from orbit_cli.types import EvalResult, SampledBatch, Trajectory


class RolloutSource:
    """Samples training batches and evaluations from one engine."""

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        generator: Generator,
        config: OrbitConfig,
        on_turn: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._generator = generator
        self._config = config
        self._on_turn = on_turn

    def sample(self, step: int, cursor: int, version: int) -> SampledBatch:
        """`prompts_per_step` groups from `version`, starting at training prompt `cursor`.

        With dynamic sampling, groups whose raw outcomes are all equal are dropped and others sampled in their place
        (2503.14476), for a bounded number of rounds; after the last round what is there is taken as it is.
        """
        rollout, algorithm = self._config.rollout, self._config.algorithm
        params = self._generator.sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
        self._engine.flush_cache()  # what a step samples must not depend on what was cached before it
        rounds = algorithm.dynamic_sampling_rounds if algorithm.dynamic_sampling else 1
        kept: list[Trajectory] = []
        sampled: list[Trajectory] = []
        groups = tried = 0
        for round_number in range(rounds):
            wanted = rollout.prompts_per_step - groups
            fresh = self._generator.sample(
                [self._environment.train_prompt(cursor + i) for i in range(wanted)],
                samples=rollout.group_size,
                params=params,
                version=version,
                seed=self._config.seed,
                place=("train", step, round_number),
                on_turn=self._on_turn,
            )
            cursor += wanted
            tried += wanted
            sampled += fresh
            chosen = fresh if round_number + 1 == rounds else _informative(fresh)
            groups += _renumber(chosen, groups)
            kept += chosen
            if groups == rollout.prompts_per_step:
                break
        metrics = _metrics(kept, sampled) | {
            "sampling_rounds": float(round_number + 1),
            "groups_discarded": float(tried - groups),
        }
        return SampledBatch(trajectories=kept, cursor=cursor, metrics=metrics)

    def evaluate(self, version: int | None) -> EvalResult:
        """Evaluate `version` (None: the base) on the held-out prompts."""
        return evaluate_version(
            self._engine, self._environment, self._generator, self._config, version=version, on_turn=self._on_turn
        )


def _informative(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Samples of groups with some right and some wrong answers, by the raw outcome (never the shaped reward)."""
    good = informative_groups(
        torch.tensor([bool(t.correct) for t in trajectories]),
        torch.tensor([t.group for t in trajectories]),
        torch.tensor([t.correct is not None for t in trajectories]),
    )
    return [t for t, keep in zip(trajectories, good.tolist(), strict=True) if keep]


def _renumber(trajectories: list[Trajectory], first: int) -> int:
    """Give groups consecutive numbers from `first`; returns how many there are."""
    numbers = {old: first + new for new, old in enumerate(sorted({t.group for t in trajectories}))}
    for trajectory in trajectories:
        trajectory.group = numbers[trajectory.group]
    return len(numbers)


def _metrics(kept: list[Trajectory], sampled: list[Trajectory]) -> dict[str, float]:
    """Rewards are those of everything sampled: the mean over kept groups alone would look better than the policy is."""
    rewards = torch.tensor([t.reward for t in sampled if t.reward is not None], dtype=torch.float64)
    graded = [t for t in sampled if t.correct is not None]
    lengths = [t.response_tokens for t in sampled]
    groups = {t.group for t in kept}
    varied = [g for g in groups if len({t.reward for t in kept if t.group == g and t.reward is not None}) > 1]
    metrics = {
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_max": float(max(lengths)),
        "truncated_share": sum(t.truncated for t in sampled) / len(sampled),
        "groups": float(len(groups)),
        "groups_informative": float(len(varied)),
        "samples": float(len(sampled)),
        "grading_failures": float(sum(t.reward is None for t in sampled)),
        "rollout_tokens": float(sum(lengths)),
        "prompt_tokens": float(sum(len(t.token_ids) - t.response_tokens for t in sampled)),
    }
    if len(rewards):
        metrics["reward_mean"] = float(rewards.mean())
        metrics["reward_std"] = float(rewards.std(correction=0))
    if graded:
        metrics["accuracy"] = sum(bool(t.correct) for t in graded) / len(graded)
    return metrics
