"""Held-out evaluation: accuracy, avg@k, unbiased pass@k and maj@k with bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable

from orbit_cli.algorithms.statistics import summarise
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.engine.protocol import RolloutEngine
from orbit_cli.environments.protocol import Environment
from orbit_cli.errors import RunError
from orbit_cli.rollout.generator import Generator
from orbit_cli.types import EvalResult, Trajectory


def evaluate_version(
    engine: RolloutEngine,
    environment: Environment,
    generator: Generator,
    config: OrbitConfig,
    *,
    version: int | None,
    on_turn: Callable[[int], None] | None = None,
) -> EvalResult:
    """Sample `evaluation.samples` answers to each held-out prompt with `version` (None: the base) and count.

    The seeds do not depend on the version or the step, so two versions are compared on the same random numbers.
    """
    evaluation = config.evaluation
    prompts = environment.eval_prompts(evaluation.prompts)
    engine.flush_cache()
    trajectories = generator.sample(
        prompts,
        samples=evaluation.samples,
        params=generator.sampling(
            evaluation.max_new_tokens or config.rollout.max_new_tokens,
            evaluation.temperature,
            evaluation.top_p,
            evaluation.top_k,
        ),
        version=version,
        seed=config.seed,
        place=("eval",),
        on_turn=on_turn,
    )
    return EvalResult(metrics=eval_metrics(trajectories, config), trajectories=trajectories)


def eval_metrics(trajectories: list[Trajectory], config: OrbitConfig) -> dict[str, float]:
    """Means over prompts, with 95% bootstrap intervals where they matter. Raises RunError if nothing was graded."""
    evaluation = config.evaluation
    by_prompt: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_prompt.setdefault(trajectory.prompt_id, []).append(trajectory)
    if all(t.correct is None for t in trajectories):
        raise RunError(f"no answer could be graded; the first failure was: {trajectories[0].error}")
    outcomes = summarise(
        [[t.correct for t in group] for group in by_prompt.values()],
        [[t.answer for t in group] for group in by_prompt.values()],
        evaluation.pass_k,
        config.seed,
        evaluation.bootstrap,
    )
    rewards = [t.reward for t in trajectories if t.reward is not None]
    metrics = {
        "accuracy": outcomes.accuracy.mean,
        "accuracy_low": outcomes.accuracy.low,
        "accuracy_high": outcomes.accuracy.high,
        "prompts": float(outcomes.prompts),
        "samples": float(evaluation.samples),
        "avg_k": outcomes.accuracy.mean,
        "maj_k": outcomes.majority.mean,
        "grading_failures": float(outcomes.ungraded),
        "reward_mean": sum(rewards) / len(rewards),
        "response_tokens_mean": sum(t.response_tokens for t in trajectories) / len(trajectories),
        "truncated_share": sum(t.truncated for t in trajectories) / len(trajectories),
    }
    for k, interval in outcomes.pass_at.items():
        metrics[f"pass@{k}"] = interval.mean
        metrics[f"pass@{k}_low"] = interval.low
        metrics[f"pass@{k}_high"] = interval.high
    return metrics
