"""One training step: scored trajectories in, a moved adapter out.

The loss of an optimiser step is one sum over all its tokens of weight * loss, with weights whose divisors were counted
over the whole step before the first backward. So neither micro-batches, nor padding, nor ranks can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_cli.algorithms.advantages import compute_advantages
from orbit_cli.algorithms.aggregation import LossDivisor, loss_divisor, loss_weights
from orbit_cli.algorithms.corrections import CorrectionResult, correction_weights, effective_share
from orbit_cli.algorithms.kl import kl_in_reward, kl_loss
from orbit_cli.algorithms.losses import token_losses
from orbit_cli.algorithms.metrics import merge
from orbit_cli.algorithms.shaping import overlong_penalty
from orbit_cli.config.schema.learning import AlgorithmConfig, Correction, KLPlacement, Overlong
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.errors import NotFiniteError
from orbit_cli.models.build import TrainerModel
from orbit_cli.trainer.batch import Batch, make_batch, micro_batches, mini_batches
from orbit_cli.trainer.heap import return_memory
from orbit_cli.trainer.optimizer import learning_rate
from orbit_cli.trainer.ranks import gather_over_ranks, own_share, sum_over_ranks
from orbit_cli.types import Trajectory

_REJECTING = {Correction.mis, Correction.icepop, Correction.sequence_mis, Correction.geometric_mis}
_COUNTS = {"gap/tokens", "ratio/tokens"}  # `tokens` says it already


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A batch with its groups, ready for the optimiser."""

    batch: Batch
    groups: list[int]
    trained: int  # samples with a gradient; the others are counted in the divisors and cost nothing
    metrics: dict[str, float]  # of shaping


def prepare(trajectories: Sequence[Trajectory], config: OrbitConfig) -> Prepared:
    """Rewards to advantages (on whole groups, before anything is split) and trajectories to tensors.

    A penalty on length joins the samples' reward_parts as `overlong`; their reward stays the grader's.
    """
    algorithm = config.algorithm
    metrics: dict[str, float] = {}
    rewards = torch.tensor([float("nan") if t.reward is None else t.reward for t in trajectories], dtype=torch.float64)
    if algorithm.overlong is Overlong.penalty:
        lengths = torch.tensor([t.response_tokens for t in trajectories])
        penalty = overlong_penalty(lengths, config.rollout.max_new_tokens, config.overlong_buffer)  # [B]
        rewards = rewards + penalty
        for trajectory, part in zip(trajectories, penalty.tolist(), strict=True):
            trajectory.reward_parts["overlong"] = part
        metrics["overlong_penalty_mean"] = float(penalty.mean())
    valid = torch.tensor([t.reward is not None and t.response_tokens > 0 for t in trajectories])
    groups = [t.group for t in trajectories]
    advantages = compute_advantages(
        rewards, torch.tensor(groups), valid, str(algorithm.advantage), algorithm.advantage_eps
    )
    masked = algorithm.overlong is Overlong.mask
    in_loss = [bool(ok) and not (masked and t.truncated) for ok, t in zip(valid, trajectories, strict=True)]
    batch = make_batch(trajectories, advantages, in_loss)
    trained = int(((advantages != 0) & torch.tensor(in_loss)).sum())
    return Prepared(batch=batch, groups=groups, trained=trained, metrics=metrics)


def optimise(
    model: TrainerModel, optimizer: torch.optim.Optimizer, prepared: Prepared, config: OrbitConfig, step: int
) -> dict[str, float]:
    """Run the optimiser steps of one batch of rollouts. Returns the metrics of the step.

    `model.bank` ends with the new values in its master weights and has not been materialised anew.
    """
    algorithm, trainer, batch = config.algorithm, config.trainer, prepared.batch
    parts: list[dict[str, Tensor]] = []
    updates = trainer.minibatches * trainer.epochs
    rejects = algorithm.correction in _REJECTING and not algorithm.keep_rejected_in_divisor
    if updates > 1 or rejects or algorithm.kl is KLPlacement.reward:
        batch.old_logprobs = _logprobs(model, batch, config)
    if algorithm.kl is not KLPlacement.none:
        with model.disabled():  # the reference policy: the base without the adapter
            batch.reference_logprobs = _logprobs(model, batch, config)
    if algorithm.kl is KLPlacement.reward:
        batch.token_advantages = kl_in_reward(
            batch.advantages, batch.old_logprobs, batch.reference_logprobs, batch.mask, algorithm.kl_coef
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(trainer, step)
    norms, divisors, losses = [], [], []
    computed = 0  # tokens of the samples that go forward and backward, on all ranks
    for _ in range(trainer.epochs):
        for rows in mini_batches(prepared.groups, trainer.minibatches):
            divisor = _divisor(batch.select(rows), algorithm)
            divisors.append(divisor)
            if divisor.tokens == 0:
                continue
            model.bank.materialize()
            model.bank.zero_grad()
            loss = 0.0
            used = _with_gradient(batch, rows, algorithm)
            computed += int(batch.lengths[used].sum())
            split = micro_batches(batch, own_share(used), trainer.micro_batch_tokens)
            for number, micro_rows in enumerate(split):
                if number:
                    return_memory(model.device)
                micro = batch.select(micro_rows)
                logprobs, entropy = _forward(model, micro, config, with_entropy=True)
                value, measured = _loss(micro, logprobs, entropy, divisor, config)
                parts.append(measured)
                value.backward()
                loss += float(value.detach())
                del logprobs, entropy, value
            losses.append(float(sum_over_ranks(torch.tensor(loss, dtype=torch.float64))))
            model.bank.pull_back()
            norms.append(_clip(model, trainer.max_grad_norm))
            optimizer.step()
    return {
        **prepared.metrics,
        **_joined(parts),
        "loss": sum(losses) / max(1, len(losses)),
        "loss_divisor_tokens": float(sum(d.tokens for d in divisors)),
        "loss_divisor_sequences": float(sum(d.sequences for d in divisors)),
        "grad_norm": max(norms, default=0.0),
        "learning_rate": learning_rate(trainer, step),
        "trained_samples": float(prepared.trained),
        "computed_tokens": float(computed),
    }


def _with_gradient(batch: Batch, rows: list[int], algorithm: AlgorithmConfig) -> list[int]:
    """Rows whose gradient is not exactly 0. A zero advantage has none unless KL or entropy act on it too."""
    every = algorithm.kl is not KLPlacement.none or algorithm.entropy_coef != 0
    return [r for r in rows if bool(batch.mask[r].any()) and (every or float(batch.advantages[r]) != 0)]


def _forward(
    model: TrainerModel, batch: Batch, config: OrbitConfig, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropy [B, T] on the CPU, where the batch is: the loss is cheap, and its gradient flows back."""
    logprobs, entropy = model.logprobs(
        batch.token_ids,
        batch.lengths,
        batch.mask,
        temperature=config.rollout.temperature,
        chunk=config.trainer.logprob_chunk_tokens,
        with_entropy=with_entropy,
    )
    return logprobs.cpu(), entropy.cpu() if entropy is not None else None


@torch.no_grad()
def _logprobs(model: TrainerModel, batch: Batch, config: OrbitConfig) -> Tensor:
    """Log-probs [B, T] of all masked tokens under the model as it is now, on every rank."""
    model.bank.materialize()
    out = torch.zeros_like(batch.rollout_logprobs)
    rows = [r for r in range(len(batch)) if bool(batch.mask[r].any())]
    for micro_rows in micro_batches(batch, own_share(rows), config.trainer.micro_batch_tokens):
        micro = batch.select(micro_rows)
        logprobs, _ = _forward(model, micro, config, with_entropy=False)
        out[torch.tensor(micro_rows), : logprobs.shape[1]] = logprobs.float().cpu()
    return sum_over_ranks(out)


def _divisor(batch: Batch, algorithm: AlgorithmConfig) -> LossDivisor:
    """What the loss of this optimiser step is divided by: counted on all its samples, before the first backward."""
    mask = batch.mask
    if batch.old_logprobs is not None and not algorithm.keep_rejected_in_divisor:
        mask = _corrected(batch, batch.old_logprobs, algorithm).kept
    return loss_divisor(mask)


def _loss(
    micro: Batch, logprobs: Tensor, entropy: Tensor, divisor: LossDivisor, config: OrbitConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the loss, and its metrics."""
    algorithm = config.algorithm
    now = logprobs.detach()
    weights, kept, gap = _corrected(micro, micro.old_logprobs if micro.old_logprobs is not None else now, algorithm)
    share = loss_weights(
        micro.mask if algorithm.keep_rejected_in_divisor else kept,
        str(algorithm.aggregation),
        divisor,
        constant=algorithm.aggregation_constant or config.rollout.max_new_tokens,
    )
    losses, ratio = token_losses(
        str(algorithm.loss),
        logprobs=logprobs,
        old_logprobs=micro.old_logprobs,
        advantages=micro.token_advantages if micro.token_advantages is not None else micro.advantages,
        mask=kept,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    total = (share * weights * losses).sum()
    if algorithm.kl is KLPlacement.loss:
        kl = kl_loss(logprobs, micro.reference_logprobs, kept, micro.old_logprobs)
        total = total + algorithm.kl_coef * (share * kl).sum()
    if algorithm.entropy_coef:
        total = total - algorithm.entropy_coef * (share * entropy).sum()
    measured = {f"gap/{name}": value for name, value in gap.items()}
    measured |= {f"ratio/{name}": value for name, value in ratio.items()}
    measured["entropy_mean"] = entropy.detach()[micro.mask].double().mean()
    if micro.reference_logprobs is not None:
        measured["kl_ref_mean"] = (now - micro.reference_logprobs)[micro.mask].double().mean()
    return total, measured | {"tokens": micro.mask.sum()}


def _corrected(batch: Batch, old: Tensor, algorithm: AlgorithmConfig) -> CorrectionResult:
    return correction_weights(
        old,
        batch.rollout_logprobs,
        batch.mask,
        str(algorithm.correction),
        algorithm.correction_low,
        algorithm.correction_high,
    )


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of a step from those of its micro-batches on all ranks: the same whatever the split."""
    gathered = [part for rank in gather_over_ranks(parts) for part in rank]
    if not gathered:  # no sample had a gradient: there is nothing to average
        return {"trained_tokens": 0.0}
    joined = merge([{name: value for name, value in p.items() if name not in _COUNTS} for p in gathered])
    names = {
        "tokens": "trained_tokens",
        "gap/gap_mean": "logprob_gap_mean",
        "gap/gap_max": "logprob_gap_max",
        "gap/outside_fraction": "ratio_outside_share",
        "gap/k3_mean": "rollout_kl",
        "gap/applied_mean": "correction_weight_mean",
        "entropy_mean": "entropy",
        "kl_ref_mean": "kl_ref",
        "ratio/ratio_max": "ratio_max",
        "ratio/clip_low_fraction": "clip_low",
        "ratio/clip_high_fraction": "clip_high",
    }
    metrics = {ours: float(joined[theirs]) for theirs, ours in names.items() if theirs in joined}
    metrics["effective_sample_share"] = float(effective_share(joined["gap/w_mean"], joined["gap/w_square_mean"]))
    metrics["kept_share"] = 1.0 - float(joined["gap/rejected_fraction"])
    return metrics


def _clip(model: TrainerModel, limit: float) -> float:
    """Sum gradients over ranks, clip by global norm; returns the norm before clipping."""
    parameters = list(model.bank.parameters())
    for parameter in parameters:
        sum_over_ranks(parameter.grad)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if not torch.isfinite(norm):
        raise NotFiniteError(f"the gradient norm is {float(norm)}")
    if limit > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)
