"""Log-probs of given tokens from hidden states, without ever holding the logits of a batch.

Softmax at the sampling temperature, in float32 on float32 logits (a BF16 softmax is off by 0.07 nats). The gradient of
a token's log-prob with respect to its hidden state is proportional to the gradient that arrives, so it is formed in the
forward pass while the chunk's probabilities exist: two products with the lm_head in all instead of three. The lm_head
is frozen. Left out: which hidden states belong to which token (orbit_cli.models.layout).

Shape letters: M tokens, H hidden, V vocabulary, C chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor, lm_head_weight: Tensor, targets: Tensor, temperature: float, chunk: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden W^T / temperature)[target] and, if asked for, the entropy over the full vocabulary.

    hidden [M, H], lm_head_weight [V, H] (frozen), targets [M] int64 -> logprobs [M], entropy [M] or None, float32.
    Differentiable in hidden, through both results; logits of at most `chunk` tokens exist at a time, in forward and
    backward. Raises ValueError for temperature <= 0: greedy sampling has no ratio to train on.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} has no log-probs to train on; set it above 0")
    logprobs, entropy = _TokenLogprobs.apply(hidden, lm_head_weight, targets, float(temperature), chunk, with_entropy)
    return logprobs, entropy if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, with_entropy):
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # d logprob / d hidden [M, H]
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logp = _log_softmax(hidden[part], weight, temperature)  # [C, V]
            logprobs[part] = logp.gather(1, targets[part, None]).squeeze(1)
            if with_entropy:
                entropy[part] = -(logp.exp() * logp).sum(1)
            if slope is not None:
                slope[part] = _logprob_slope(logp.exp_(), weight, targets[part], temperature)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(slope, *((hidden, weight, entropy) if with_entropy else ()))
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        slope, *rest = ctx.saved_tensors
        grad = torch.zeros_like(slope) if grad_logprobs is None else (slope * grad_logprobs[:, None]).to(slope.dtype)
        if rest and grad_entropy is not None and grad_entropy.any():  # one that is only logged costs nothing here
            hidden, weight, entropy = rest
            for start in range(0, len(entropy), ctx.chunk):
                part = slice(start, start + ctx.chunk)
                pull = _entropy_slope(hidden[part], weight, entropy[part], ctx.temperature)
                grad[part] += (pull * grad_entropy[part, None]).to(grad.dtype)
        return grad, None, None, None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[C, V] float32."""
    if weight.dtype is torch.float32:
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # BF16 products, float32 logits
    else:
        logits = hidden.float() @ weight.float().t()
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.sub_(torch.logsumexp(logits, 1, keepdim=True))


def _logprob_slope(probs: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """(W[target] - sum_v p_v W_v) / T: [C, H]. Overwrites probs."""
    probs.neg_().scatter_add_(1, targets[:, None], torch.ones_like(targets, dtype=probs.dtype)[:, None])
    return (probs.to(weight.dtype) @ weight) / temperature


def _entropy_slope(hidden: Tensor, weight: Tensor, entropy: Tensor, temperature: float) -> Tensor:
    """dH/dz_v = -p_v (log p_v + H), times W, over T: [C, H]."""
    logp = _log_softmax(hidden, weight, temperature)
    slope = -(logp.exp() * (logp + entropy[:, None]))
    return (slope.to(weight.dtype) @ weight) / temperature
