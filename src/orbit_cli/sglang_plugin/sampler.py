"""Sampling that is a function of (logits, temperature, seed, position), and exact log-probs of what was drawn.

SGLang 0.5.17 draws from one global generator unless its deterministic mode is on, which a CPU does not have. Here each
request brings its seed; one uniform number per (seed, position) comes from a counter-based hash and picks the token by
inverse transform, so a sample depends neither on its neighbours in the batch nor on when it was scheduled.
The log-prob is the float32 log-softmax of the logits over the temperature, over the full vocabulary, before any top-k
or top-p. Left out: min-p, grammars' alternatives, top log-probs (SGLang's own sampler keeps those requests).

Shape letters: B requests, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), signed.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)
_CHUNK = 128  # vocabulary entries per first-level sum of the inverse transform


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float64 in [0, 1) per row, from int64 seeds [B] and positions [B]; equal inputs give equal numbers."""
    state = _mix(seeds.long() + _GAMMA)
    state = _mix(state + (positions.long() + 1) * _GAMMA)
    return _shift(state, 11).double() * 2.0**-53


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse transform: the first token whose cumulative weight exceeds u * total. weights >= 0 [B, V], u [B] -> [B].

    Two levels (chunk sums in float64, then inside one chunk), because a cumulative sum over a whole vocabulary in
    float32 loses the rare tokens.
    """
    rows, vocabulary = weights.shape
    chunks = -(-vocabulary // _CHUNK)
    if vocabulary % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, chunks * _CHUNK - vocabulary))
    padded = weights.view(rows, chunks, _CHUNK)
    levels = padded.sum(-1).double().cumsum(-1)  # [B, chunks]
    target = u.unsqueeze(1) * levels[:, -1:]  # [B, 1]
    chunk = torch.searchsorted(levels, target, right=True).clamp_(max=chunks - 1)  # [B, 1]
    before = torch.where(chunk > 0, levels.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inside = padded.gather(1, chunk.unsqueeze(-1).expand(-1, 1, _CHUNK)).squeeze(1).double()  # [B, chunk entries]
    within = inside.cumsum(-1)
    # Float sums of the two levels differ in the last bits, so the target may lie a hair past the chunk's own total.
    rest = torch.minimum(target - before, within[:, -1:] * (1.0 - 2.0**-52))
    token = torch.searchsorted(within, rest.clamp_(min=0.0), right=True).clamp_(max=_CHUNK - 1)
    return (chunk * _CHUNK + token).squeeze(1)


def truncate(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [B, V] sorted downwards with what top-k and top-p cut set to 0, and their token ids [B, V]."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(probs.shape[1], device=probs.device) < top_ks.unsqueeze(1)
    keep &= ordered.double().cumsum(-1) - ordered.double() <= top_ps.unsqueeze(1).double()
    return torch.where(keep, ordered, 0.0), ids


def sample(
    original, self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
):
    """Around SGLang's Sampler.forward: next token ids [B]; log-probs go into `logits_output.next_token_logprobs`."""
    if _needs_stock_sampler(sampling_info, top_logprobs_nums, token_ids_logprobs):
        return original(
            self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
        )
    logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()  # [B, V]
    greedy = logits.argmax(-1) if sampling_info.is_any_greedy else None
    # In place, as SGLang's own sampler does: a vocabulary-wide copy costs as much as the exponential.
    shifted = logits.div_(sampling_info.temperatures.view(-1, 1))
    shifted = shifted.sub_(shifted.amax(-1, keepdim=True))
    weights = shifted.exp()  # [B, V]: the softmax but for its denominator
    if sampling_info.is_all_greedy:
        tokens = greedy
    else:
        tokens = _draw(weights, sampling_info, positions)
        if greedy is not None:
            tokens = torch.where(sampling_info.top_ks <= 1, greedy, tokens)
    if return_logprob:
        chosen = shifted.gather(1, tokens.unsqueeze(1)).squeeze(1)
        total = weights.sum(-1, dtype=torch.float64)
        logits_output.next_token_logprobs = (chosen.double() - total.log()).float()  # [B]
    self._sync_token_ids_across_tp(tokens, sampling_info)
    return tokens


def _draw(weights: Tensor, sampling_info, positions: Tensor) -> Tensor:
    u = uniforms(sampling_info.sampling_seed, positions)
    if not (sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling):
        return pick(weights, u)
    probs = weights / weights.sum(-1, keepdim=True)
    ordered, ids = truncate(probs, sampling_info.top_ks, sampling_info.top_ps)
    return ids.gather(1, pick(ordered, u).unsqueeze(1)).squeeze(1)


def _needs_stock_sampler(sampling_info, top_logprobs_nums, token_ids_logprobs) -> bool:
    return (
        sampling_info.sampling_seed is None
        or sampling_info.need_min_p_sampling
        or any(sampling_info.return_sampling_masks or [])
        or any(top_logprobs_nums or [])
        or any(ids is not None for ids in token_ids_logprobs or [])
    )


def keep_seeds(result, _cls, batch, vocab_size):
    """After SamplingBatchInfo.from_schedule_batch: every request's own seed, which SGLang drops outside its mode."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if any(seed is None for seed in seeds):
        seeds = [0 if seed is None else seed for seed in seeds]
    result.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(result.device, non_blocking=True)
    return result


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's output function; int64 products wrap around."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)
