"""Every metric that a run writes, with its meaning and unit.

metrics.jsonl should hold no other name: the end-to-end tests check rows with `unknown`. A name that is missing here is
written all the same, because no run may end over it.

A row is `{"kind": "train" | "eval" | "sync", "step": int, "time": ISO, name: number, ...}`, where step counts the
finished training steps (the first train row has 1, the evaluation before training 0); null stands for a number that was
not finite. Rows of `orbit eval` also have "policy": the name of what was evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

KINDS = ("train", "eval", "sync")
ROW_KEYS = ("kind", "step", "time", "policy")  # of every row, besides its metrics

NAMES: dict[str, str] = {
    # reward
    "reward_mean": "mean reward of the step's samples, failed gradings left out",
    "reward_std": "standard deviation of the same",
    "overlong_penalty_mean": "mean penalty on length (0 to -1) of the samples; it is not in reward_mean",
    "accuracy": "share of samples that are correct (train: of the step; eval: mean over prompts)",
    "response_tokens_mean": "mean length of a response, in tokens that the policy chose",
    "response_tokens_max": "longest response, in the same tokens",
    "prompt_tokens": "tokens of the prompts and of the environment, over all samples",
    "truncated_share": "share of samples that ended at max_new_tokens",
    "groups": "prompts that were trained on",
    "groups_informative": "of these, prompts whose samples do not all have the same reward",
    "groups_discarded": "prompts that dynamic sampling dropped, their samples all right or all wrong, and replaced",
    "sampling_rounds": "rounds of dynamic sampling",
    "grading_failures": "samples whose grader raised or hung; they leave baseline and loss",
    # optimisation
    "loss": "loss of the optimiser step(s), with the divisors of the backward pass",
    "loss_divisor_tokens": "tokens that the loss is divided by, over the whole step",
    "loss_divisor_sequences": "sequences that the loss is divided by, over the whole step",
    "trained_samples": "samples with a gradient",
    "trained_tokens": "policy tokens with a gradient",
    "computed_tokens": "tokens of the samples with a gradient, each counted with its prompt, though samples of a group "
    "share its computation; once per epoch",
    "grad_norm": "norm of the adapter's gradient before clipping",
    "learning_rate": "learning rate of the step",
    "entropy": "mean entropy of the policy over the full vocabulary, at the sampling temperature, in nats",
    "kl_ref": "mean k1 estimate of KL(policy || base) on the sampled tokens, in nats",
    "clip_low": "share of tokens clipped at the lower bound",
    "clip_high": "share of tokens clipped at the upper bound",
    "ratio_max": "largest ratio of new to old policy",
    # trainer against engine
    "logprob_gap_mean": "mean |trainer's log-prob - engine's| on the sampled tokens, in nats",
    "logprob_gap_max": "largest of the same, in nats",
    "ratio_outside_share": "share of sampled tokens whose trainer-to-engine ratio is outside [1/2, 2]",
    "rollout_kl": "k3 estimate of KL(engine || trainer) on the sampled tokens, in nats",
    "effective_sample_share": "effective sample size of the trainer-to-engine ratios, as a share of the tokens",
    "correction_weight_mean": "mean weight of the rollout correction",
    "kept_share": "share of tokens that the correction kept",
    # time and rate
    "rollout_seconds": "time of sampling and grading",
    "train_seconds": "time of the optimisation",
    "sync_seconds": "time of publishing the adapter and proving that it arrived",
    "eval_seconds": "time of evaluation",
    "step_seconds": "time of the whole step",
    "rollout_tokens": "tokens sampled in the step",
    "rollout_tokens_per_second": "tokens sampled per second of rollout",
    "train_tokens_per_second": "computed_tokens per second of optimisation; what has no gradient is not computed",
    # adapter
    "swap_bytes": "bytes of the published adapter version",
    "swap_milliseconds": "time until the engine held and confirmed it",
    "version": "adapter version that was published",
    "adapter_orthogonality_error": "OFT: largest max-abs entry of R R^T - I, R in float32",
    "adapter_lambda_max": "OFT: largest spectral norm of a skew block; the series needs it below 1",
    "adapter_norm": "Euclidean norm of the adapter's parameters",
    # machine
    "rss_gib": "resident memory of this process and its children",
    # evaluation
    "accuracy_low": "lower end of the 95% bootstrap interval over prompts",
    "accuracy_high": "upper end of the same",
    "avg_k": "mean correctness over all samples of a prompt, then over prompts",
    "maj_k": "share of prompts whose most frequent answer is correct",
    "prompts": "held-out prompts evaluated",
    "samples": "train: samples of the step; eval: samples per prompt",
    # publish
    "probe_gap_mean": "mean |trainer - engine| log-prob on the fixed probes after a publish, in nats",
    "probe_gap_judged": "the mean that sync.max_mean_gap judges: in bfloat16 without the largest eighth",
    "probe_gap_max": "largest of the same",
    "probe_moved_trainer": "mean |change| of the trainer's log-probs on the probes since the last version, in nats",
    "probe_moved_engine": "the same of the engine's",
    "probe_effect": "share of the adapter's movement of the trainer's log-probs since the base that the engine's show",
}
PATTERNS: dict[str, str] = {
    r"pass@[1-9]\d*": "unbiased pass@k (2107.03374): chance that at least one of k samples is correct",
    r"pass@[1-9]\d*_(low|high)": "its 95% bootstrap interval over prompts",
    r"reward_part/[\w.-]+": "mean of one part of the reward",
}


def meaning(name: str) -> str | None:
    """What a metric means, or None if there is no such metric."""
    if name in NAMES:
        return NAMES[name]
    return next((text for pattern, text in PATTERNS.items() if re.fullmatch(pattern, name)), None)


def unknown(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names in rows of metrics.jsonl that have no meaning here."""
    return {name for row in rows for name in row if name not in ROW_KEYS and meaning(name) is None}
