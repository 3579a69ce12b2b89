"""Config of how it is trained: algorithm, optimisation, rollouts, environment, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from orbit_cli.config.schema import bounds
from orbit_cli.errors import ConfigError

# Beyond these a run could never end: at 10,000 samples a second a step of so many takes an hour.
MOST_SAMPLES = 10**7
MOST_TURNS = 1000
MOST_DRAWS = 10**6


class Advantage(StrEnum):
    """Advantage estimator."""

    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    reinforce_pp = "reinforce_pp"
    reinforce_pp_baseline = "reinforce_pp_baseline"


class Loss(StrEnum):
    """Policy loss."""

    ppo_clip = "ppo_clip"
    gspo = "gspo"
    cispo = "cispo"
    reinforce = "reinforce"


class Aggregation(StrEnum):
    """What the token losses are divided by; all sums run over the whole optimiser step."""

    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    constant = "constant"


class Correction(StrEnum):
    """Correction of the difference between trainer and engine."""

    none = "none"
    tis = "tis"
    mis = "mis"
    icepop = "icepop"
    sequence_tis = "sequence_tis"
    sequence_mis = "sequence_mis"
    geometric_mis = "geometric_mis"


class KLPlacement(StrEnum):
    """Where the KL to the reference policy (the base without adapter) goes."""

    none = "none"
    reward = "reward"
    loss = "loss"


class Overlong(StrEnum):
    """What happens to truncated samples."""

    keep = "keep"
    mask = "mask"
    penalty = "penalty"


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """The policy-gradient algorithm."""

    name: str
    """Name for the records; the fields below decide."""
    advantage: Advantage = Advantage.grpo
    """grpo (2402.03300), dr_grpo: no division by the group's std (2503.20783), rloo: leave one out (2402.14740),
    reinforce_pp: whitened over the batch, reinforce_pp_baseline: group mean, batch std (2501.03262)."""
    advantage_eps: float = 1e-6
    """grpo: added to the group's (unbiased) standard deviation. Groups with equal rewards get exactly 0."""
    loss: Loss = Loss.ppo_clip
    """ppo_clip (1707.06347), gspo: one ratio per sequence (2507.18071), cispo (2506.13585), reinforce: no ratio."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped above 1 + clip_high (clip-higher, 2503.14476: 0.28)."""
    dual_clip: float | None = None
    """Bound c > 1 on the loss of negative advantages (1912.09729; usually 3); null switches it off."""
    aggregation: Aggregation = Aggregation.seq_mean_token_mean
    """token_mean (DAPO in its batch form), seq_mean_token_mean (GRPO), seq_mean_token_sum, constant (Dr.GRPO)."""
    aggregation_constant: int | None = None
    """constant: the divisor; null means rollout.max_new_tokens."""
    correction: Correction = Correction.tis
    """Weight exp(log pi_old - log mu), detached: tis min(w, high); mis rejects w > high; icepop rejects outside
    [low, high] (2510.18855); sequence_* use the whole sequence's ratio, geometric_mis rejects by its geometric mean."""
    correction_low: float = 0.5
    """icepop and geometric_mis: lower bound."""
    correction_high: float = 2.0
    """Upper bound of the correction weight."""
    keep_rejected_in_divisor: bool = False
    """Whether rejected tokens still count in the loss divisor."""
    kl: KLPlacement = KLPlacement.none
    """reward: k1 per token, off the advantage; loss: k2, whose on-policy gradient is that of KL(pi || ref)."""
    kl_coef: float = 0.0
    """Coefficient of the KL term."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, over the full vocabulary at the sampling temperature."""
    overlong: Overlong = Overlong.keep
    """keep: with its reward; mask: out of the loss, KL and entropy, still in the group's baseline; penalty: DAPO's, 0
    to -1 over the zone below, added to the reward that advantages are made of (metric overlong_penalty_mean)."""
    overlong_buffer: int | None = None
    """penalty: tokens of the soft zone before rollout.max_new_tokens (2503.14476: a fifth of the longest response).
    null: a quarter of it, rounded down, at least 1."""
    dynamic_sampling: bool = False
    """Drop prompts whose samples are all right or all wrong (raw outcome) and sample others in their place (DAPO)."""
    dynamic_sampling_rounds: int = 4
    """Rounds of refilling at most; then the step goes on with what there is."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "algorithm", 0, "advantage_eps", "clip_low", "clip_high", "overlong_buffer")
        bounds.at_least(self, "algorithm", 1, "aggregation_constant", "dynamic_sampling_rounds")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"algorithm.dual_clip={self.dual_clip} must be above 1; usual is 3, null switches it off")
        if self.kl is not KLPlacement.none and self.kl_coef <= 0:
            raise ConfigError(
                f"algorithm.kl={self.kl} with kl_coef={self.kl_coef} does nothing; set kl_coef or kl=none"
            )
        if self.kl is KLPlacement.none and self.kl_coef:
            raise ConfigError(f"algorithm.kl_coef={self.kl_coef} is unused with kl=none; set kl=reward or kl=loss")
        if self.overlong is Overlong.penalty and self.overlong_buffer == 0:
            raise ConfigError(
                "algorithm.overlong=penalty needs algorithm.overlong_buffer of at least 1 token; null takes a quarter "
                "of rollout.max_new_tokens"
            )
        if not 0 < self.correction_low <= 1 <= self.correction_high:
            raise ConfigError(
                f"algorithm.correction_low={self.correction_low} and correction_high={self.correction_high} "
                "must bracket 1"
            )


class Schedule(StrEnum):
    """Learning-rate schedule after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class ExpertPath(StrEnum):
    """How the trainer multiplies routed experts."""

    auto = "auto"
    kernels = "kernels"
    chunked = "chunked"
    fastest = "fastest"
    reference = "reference"


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The optimisation step (AdamW on float32 master weights)."""

    steps: int
    """Training steps: one batch of rollouts each."""
    learning_rate: float
    """Peak learning rate."""
    schedule: Schedule = Schedule.constant
    """constant, linear to 0, or cosine to 0 over trainer.steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """Adam's beta1."""
    beta2: float = 0.95
    """Adam's beta2."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay on the adapter's parameters."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this; 0 switches clipping off."""
    minibatches: int = 1
    """Optimiser steps per batch of rollouts; whole groups stay together."""
    epochs: int = 1
    """Passes over each batch of rollouts."""
    micro_batch_tokens: int = 4096
    """Tokens (padded) of one forward and backward; the result does not depend on it."""
    logprob_chunk_tokens: int = 512
    """Tokens whose logits exist at the same time; the result does not depend on it."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    expert_path: ExpertPath = ExpertPath.auto
    """Routed experts: kernels straight from the packed bytes (GPU), chunked decodes the experts that were hit within
    expert_chunk_bytes, fastest times both once per device, reference is plain PyTorch; auto: kernels on a GPU."""
    expert_chunk_bytes: int = 1 << 30
    """expert_path=chunked or fastest: bytes of decoded experts that may exist at the same time."""
    checkpoint_every: int = 1
    """Steps between checkpoints: a killed run loses at most these. 0: only the last step is kept."""
    keep_checkpoints: int = 2
    """Older checkpoints are removed, and with them their adapters. adapters/ keeps, as PEFT folders, every version that
    was evaluated (evaluation.every) and the last one."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "trainer", 1, "steps", "minibatches", "epochs", "micro_batch_tokens")
        bounds.at_least(self, "trainer", 1, "logprob_chunk_tokens", "expert_chunk_bytes", "keep_checkpoints")
        bounds.at_least(self, "trainer", 0, "warmup_steps", "weight_decay", "max_grad_norm")
        bounds.share(self, "trainer", "beta1", "beta2", below_one=True)
        bounds.positive(self, "trainer", learning_rate=1e-4, adam_eps=1e-8)
        if self.checkpoint_every < 0:
            raise ConfigError(
                f"trainer.checkpoint_every={self.checkpoint_every} must be at least 0; set 0 for the last step only"
            )


class Split(StrEnum):
    """Part of a dataset."""

    train = "train"
    eval = "eval"


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Sampling for training (`orbit rollout` uses it too)."""

    prompts_per_step: int = 8
    """Prompts in a training step."""
    group_size: int = 8
    """Samples per prompt."""
    max_new_tokens: int = 64
    """Longest response, in tokens."""
    max_prompt_tokens: int = 512
    """Longer prompts are refused before anything is sampled."""
    temperature: float = 1.0
    """Sampling temperature; log-probs, entropy and loss are all of the policy at this temperature."""
    top_p: float = 1.0
    """Only 1 can be trained on: a truncated policy is another policy than the one whose log-probs are known."""
    top_k: int = -1
    """Only -1 can be trained on, for the same reason."""
    collect_prompts: int = 64
    """`orbit rollout`: number of prompts to sample."""
    collect_split: Split = Split.train
    """`orbit rollout`: training prompts (in training order) or held-out prompts."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "rollout", 1, "collect_prompts", "prompts_per_step", "group_size")
        bounds.at_least(self, "rollout", 1, "max_new_tokens", "max_prompt_tokens")
        bounds.at_most(self, "rollout", collect_prompts=MOST_SAMPLES, prompts_per_step=MOST_SAMPLES)
        bounds.at_most(self, "rollout", group_size=MOST_SAMPLES)
        bounds.truncation(self, "rollout")
        samples = self.prompts_per_step * self.group_size
        if samples > MOST_SAMPLES:
            raise ConfigError(
                f"rollout.prompts_per_step={self.prompts_per_step} with group_size={self.group_size} makes {samples} "
                f"samples a step, more than any run ends with; lower one so that there are at most {MOST_SAMPLES}"
            )
        if self.temperature < 0:
            raise ConfigError(f"rollout.temperature={self.temperature} must not be negative")


class EnvironmentKind(StrEnum):
    """Where tasks come from."""

    reasoning_gym = "reasoning_gym"
    file = "file"
    python = "python"


class RewardKind(StrEnum):
    """Grader."""

    task = "task"
    exact = "exact"
    math = "math"
    regex = "regex"
    python = "python"


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """The grader of a response."""

    kind: RewardKind = RewardKind.task
    """task: the reasoning-gym task's own score; exact: equal to the answer after stripping; math: math-verify on the
    last boxed answer; regex: first group of `pattern` equals the answer; python: `function`."""
    extract: str | None = None
    """Regular expression; its first group (last match) is what is graded. null: the whole response."""
    pattern: str | None = None
    """kind=regex: the expression that must match the whole stripped response; a group in it must equal the answer."""
    function: str | None = None
    """kind=python: import path module:function, called with (response: str, prompt: Prompt) and returning a float."""
    timeout_s: float = 10.0
    """A grader that takes longer, or raises, makes a counted failure: the sample leaves baseline and loss."""
    correct_above: float = 0.99
    """A reward of at least this counts as a correct answer in accuracy, pass@k and dynamic sampling."""

    def __post_init__(self) -> None:
        bounds.positive(self, "environment.reward", timeout_s=10)


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Tasks, prompts and reward."""

    name: str
    """Name for the records."""
    kind: EnvironmentKind = EnvironmentKind.reasoning_gym
    """reasoning_gym: procedural tasks by name; file: JSONL or Parquet; python: a class of your own (multi-turn too)."""
    task: str | None = None
    """kind=reasoning_gym: name of the dataset, for example chain_sum."""
    params: dict[str, Any] = field(default_factory=dict)
    """kind=reasoning_gym: parameters of the dataset; kind=python: keyword arguments of the class."""
    path: str | None = None
    """kind=file: JSONL or Parquet file of training prompts."""
    eval_path: str | None = None
    """kind=file: held-out prompts; null takes the last evaluation.prompts rows of path away from training."""
    prompt_column: str = "prompt"
    """kind=file: column of the prompt (text, or a list of chat messages)."""
    answer_column: str = "answer"
    """kind=file: column of the answer."""
    target: str | None = None
    """kind=python: import path module:Class of an Environment."""
    system_prompt: str | None = None
    """System message before every prompt; null sends none (a template may add its own)."""
    prompt_template: str = "{prompt}"
    """Text around each prompt; {prompt} is replaced."""
    size: int = 100000
    """kind=reasoning_gym: number of training tasks before they repeat."""
    max_turns: int = 1
    """Turns of the policy at most, for environments that answer back."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The grader."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "environment", 1, "size", "max_turns")
        bounds.at_most(self, "environment", max_turns=MOST_TURNS)
        need = {"reasoning_gym": "task", "file": "path", "python": "target"}[self.kind]
        if not getattr(self, need):
            raise ConfigError(f"environment.kind={self.kind} needs environment.{need}")
        if "{prompt}" not in self.prompt_template:
            raise ConfigError(
                "environment.prompt_template has no {prompt}: the task would never be shown; add {prompt}"
            )


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out evaluation."""

    prompts: int = 64
    """Held-out prompts; never trained on."""
    samples: int = 4
    """Samples per prompt."""
    temperature: float = 1.0
    """Sampling temperature of evaluation."""
    top_p: float = 1.0
    """Nucleus of evaluation."""
    top_k: int = -1
    """Top-k of evaluation."""
    max_new_tokens: int | None = None
    """Longest response; null means rollout.max_new_tokens."""
    every: int = 0
    """Steps between evaluations during training, each of which also leaves its version in adapters/; 0: only before the
    first and after the last."""
    pass_k: list[int] = field(default_factory=lambda: [1, 4])
    """k of the unbiased pass@k (2107.03374); each at most evaluation.samples."""
    bootstrap: int = 2000
    """Bootstrap resamples (over prompts) of the 95% intervals."""
    base: bool = True
    """`orbit eval`: also evaluate the base without adapter, side by side."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "evaluation", 1, "samples", "max_new_tokens", "bootstrap")
        bounds.at_least(self, "evaluation", 0, "prompts", "every", "temperature")
        bounds.at_most(self, "evaluation", prompts=MOST_SAMPLES, samples=MOST_SAMPLES, bootstrap=MOST_DRAWS)
        bounds.truncation(self, "evaluation")
        if self.prompts * self.samples > MOST_SAMPLES:
            raise ConfigError(
                f"evaluation.prompts={self.prompts} with samples={self.samples} makes {self.prompts * self.samples} "
                f"samples, more than any run ends with; lower one so that there are at most {MOST_SAMPLES}"
            )
        if any(k < 1 for k in self.pass_k):
            raise ConfigError(f"evaluation.pass_k has {min(self.pass_k)}; each k must be at least 1")
        too_big = [k for k in self.pass_k if k > self.samples]
        if too_big:
            raise ConfigError(
                f"evaluation.pass_k has {too_big[0]} but only evaluation.samples={self.samples} are drawn; "
                f"set evaluation.samples={too_big[0]} or lower pass_k"
            )
