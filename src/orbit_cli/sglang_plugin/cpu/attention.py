"""Attention on a CPU for a whole batch at once.

SGLang's torch_native backend loops over requests in Python for every layer. Here the requests of a batch are gathered
from the paged cache into one padded tensor and attended to by a single scaled_dot_product_attention; grouped-query
heads become further queries of their key head, so keys and values are never repeated. Left out: cross attention,
encoder attention and sliding windows (SGLang's own loop keeps those).

Shape letters: B requests, Q queries of a request (padded), L keys of a request (padded), T tokens, H query heads,
G key heads, D head size, V value head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Padded scores of one attention call at most (4 bytes each); a batch beyond it is cut into groups of requests.
_MAX_SCORES = 1 << 24


@dataclass(slots=True)
class Group:
    """Requests that are attended to together, padded to the longest."""

    rows: Tensor  # [B, Q] int64: token rows of the batch; padding repeats a row of the same request
    keys: Tensor  # [B * L] int64: cache positions; padding repeats the first
    mask: Tensor  # [B, 1, Q, L] float: 0 where a query may look, -inf elsewhere; repeated for heads that share a key
    live: Tensor | None  # [tokens] int64: flat positions in [B * Q] that are real, or None if all are


def decode(original, self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs):
    """Around TorchNativeAttnBackend._run_sdpa_forward_decode: one query per request. Fills output [T, H, V]."""
    if _unusual(args, kwargs):
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *args, **kwargs
        )
    shared = query.shape[1] // k_cache.shape[1]
    ones = [1] * seq_lens.shape[0]
    groups = _cached(self, lambda: plan(req_to_token, req_pool_indices, seq_lens.tolist(), ones, shared))
    return attend(groups, query, output, k_cache, v_cache, kwargs["scaling"])


def extend(
    original, self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
    extend_prefix_lens, extend_seq_lens, *args, **kwargs,
):  # fmt: skip
    """Around TorchNativeAttnBackend._run_sdpa_forward_extend: new tokens behind a cached prefix."""
    if _unusual(args, kwargs) or not kwargs.get("causal"):
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            extend_prefix_lens, extend_seq_lens, *args, **kwargs,
        )  # fmt: skip
    shared, new = query.shape[1] // k_cache.shape[1], extend_seq_lens.tolist()
    groups = _cached(self, lambda: plan(req_to_token, req_pool_indices, seq_lens.tolist(), new, shared))
    return attend(groups, query, output, k_cache, v_cache, kwargs["scaling"])


def forget_plan(_self, *_args, **_kwargs) -> None:
    """Before TorchNativeAttnBackend.init_forward_metadata: a new batch needs a new plan."""
    _self.orbit_plan = None


def plan(
    req_to_token: Tensor, req_pool_indices: Tensor, lengths: list[int], queries: list[int], shared: int
) -> list[Group]:
    """Groups of requests of similar size for a batch, in the order of its tokens.

    lengths: keys of each request, new tokens included; queries: its new tokens; shared: query heads of a key head.
    """
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    order = sorted(range(len(lengths)), key=lambda i: (queries[i], lengths[i]))
    groups: list[list[int]] = []
    for i in order:
        tail = groups[-1] if groups else None
        # Padding only pays among alike: a request joins while it has less than twice the group's fewest queries.
        if tail and queries[i] < 2 * queries[tail[0]] and (len(tail) + 1) * queries[i] * lengths[i] <= _MAX_SCORES:
            tail.append(i)
        else:
            groups.append([i])
    return [_group(req_to_token, req_pool_indices, lengths, queries, starts, members, shared) for members in groups]


def _group(req_to_token, req_pool_indices, lengths, queries, starts, members, shared) -> Group:
    size = torch.tensor([lengths[i] for i in members]).unsqueeze(1)  # [B, 1]
    count = torch.tensor([queries[i] for i in members]).unsqueeze(1)
    start = torch.tensor([starts[i] for i in members]).unsqueeze(1)
    step = torch.arange(int(count.max()))  # [Q]
    real = step < count  # [B, Q]
    rows = start + torch.minimum(step, count - 1)
    key = torch.arange(int(size.max()))  # [L]
    table = req_to_token[req_pool_indices[torch.tensor(members)].long(), : key.numel()].long()  # [B, L]
    keys = torch.where(key < size, table, table[:, :1])
    last = size - count + torch.minimum(step, count - 1)  # [B, Q]: position of each query in its sequence
    mask = torch.zeros(len(members), 1, step.numel(), key.numel())
    mask.masked_fill_((key > last.unsqueeze(-1)).unsqueeze(1), float("-inf"))
    live = None if bool(real.all()) else real.flatten().nonzero().squeeze(1)
    return Group(rows, keys.flatten(), mask.repeat(1, 1, shared, 1), live)


def attend(groups: list[Group], query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, scaling) -> Tensor:
    """query [T, H, D] against the caches [slots, G, D] and [slots, G, V], into output [T, H, V]."""
    heads, key_heads = query.shape[1], k_cache.shape[1]
    shared = heads // key_heads
    for group in groups:
        b, q = group.rows.shape
        own = query.index_select(0, group.rows.flatten()).view(b, q, key_heads, shared, -1)
        own = own.permute(0, 2, 3, 1, 4).reshape(b, key_heads, shared * q, -1)  # [B, G, shared * Q, D]
        keys = _gather(k_cache, group.keys, b, query.dtype)  # [B, G, L, D]
        values = _gather(v_cache, group.keys, b, query.dtype)  # [B, G, L, V]
        mask = group.mask.to(query.dtype)  # [B, 1, shared * Q, L]
        out = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scaling)
        out = out.view(b, key_heads, shared, q, -1).permute(0, 3, 1, 2, 4).reshape(b * q, heads, -1)  # [B * Q, H, V]
        if group.live is None:
            output.index_copy_(0, group.rows.flatten(), out)
        else:
            output.index_copy_(0, group.rows.flatten()[group.live], out[group.live])
    return output


def _gather(cache: Tensor, keys: Tensor, requests: int, dtype: torch.dtype) -> Tensor:
    """[slots, G, D] at [B * L] -> [B, G, L, D]; index_select is three times faster here than indexing."""
    found = cache.index_select(0, keys)
    return found.view(requests, -1, *cache.shape[1:]).transpose(1, 2).to(dtype)


def _cached(backend, make) -> list[Group]:
    """The batch's plan, made once and used by every layer."""
    if getattr(backend, "orbit_plan", None) is None:
        backend.orbit_plan = make()
    return backend.orbit_plan


def _unusual(args: tuple, kwargs: dict) -> bool:
    encoder = args[0] if args else kwargs.get("encoder_lens")
    return encoder is not None or kwargs.get("is_cross_attn") or kwargs.get("sliding_window_size") is not None
