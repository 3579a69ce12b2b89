"""Rows for the forward pass: right-padded sequences, with a prompt that several of them share computed once.

A group of samples of one prompt becomes one row [prompt, response 1, response 2, ...]: every response attends to the
prompt and to itself, and its positions go on from the prompt's. That is the same function as one row per sample, at a
fraction of the tokens when responses are short. The last token of a sequence is never an input: nothing scored
comes after it. Left out: the model.

Shape letters: B sequences, T their padded length, R rows, S padded row length, M scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the model reads, and where the hidden state of each scored token's predecessor is found."""

    input_ids: Tensor  # [R, S] int64
    position_ids: Tensor  # [R, S] int64
    attention_mask: Tensor | None  # [R, 1, S, S] bool, True = may look; None: plain causal
    source: Tensor  # [M] int64, index into the flattened [R * S] hidden states
    sequence: Tensor  # [M] int64, which sequence
    position: Tensor  # [M] int64, which token of it
    targets: Tensor  # [M] int64, token ids

    @property
    def tokens(self) -> int:
        return self.input_ids.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Relative cost of a row layout: per token, and per pair of tokens in a row (attention)."""

    token: float
    pair: float

    def of(self, rows: int, length: int) -> float:
        return rows * length * (self.token + self.pair * length)


def plan(token_ids: Tensor, lengths: Tensor, mask: Tensor, cost: Cost) -> Layout:
    """The cheapest number of responses to a shared prompt in one row: 1, 2, 4, ... or all of a group.

    token_ids [B, T] right-padded, lengths [B], mask [B, T] bool of scored tokens (on any device; read on the CPU).
    Raises ValueError if a scored token has no predecessor or lies behind the sequence's end.
    """
    device = token_ids.device
    ids, lengths, mask = token_ids.cpu(), lengths.cpu(), mask.cpu()
    _check(lengths, mask)
    first, ends = _scored_range(mask)
    groups = _group_by_prompt(ids, first)
    most = max(len(group) for group in groups)
    widths = [1 << power for power in range(most.bit_length())] + [most]  # responses that share a row
    candidates = [[group[i : i + width] for group in groups for i in range(0, len(group), width)] for width in widths]
    rows = min(candidates, key=lambda groups: cost.of(len(groups), _longest(groups, first, ends)))
    return _lay_out(rows, ids, first, ends, mask, device)


def _check(lengths: Tensor, mask: Tensor) -> None:
    if mask[:, 0].any():
        raise ValueError("the first token of a sequence has nothing before it to be predicted from; mask it out")
    behind = torch.arange(mask.shape[1])[None] >= lengths[:, None]
    if (mask & behind).any():
        raise ValueError("a scored token lies behind the end of its sequence")


def _scored_range(mask: Tensor) -> tuple[list[int], list[int]]:
    """First scored token of each sequence, and one past its last input; (1, 1) for a sequence without any."""
    width = mask.shape[1]
    found = mask.any(1)
    first = torch.where(found, mask.int().argmax(1), 1)
    last = torch.where(found, width - 1 - mask.flip(1).int().argmax(1), 1)
    return first.tolist(), last.tolist()


def _group_by_prompt(ids: Tensor, first: list[int]) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(ids.tolist()):
        groups.setdefault(tuple(row[: first[index]]), []).append(index)
    return list(groups.values())


def _longest(groups: list[list[int]], first: list[int], ends: list[int]) -> int:
    return max(first[group[0]] + sum(ends[i] - first[i] for i in group) for group in groups)


def _lay_out(groups, ids: Tensor, first: list[int], ends: list[int], mask: Tensor, device: torch.device) -> Layout:
    length = _longest(groups, first, ends)
    input_ids = torch.zeros(len(groups), length, dtype=torch.int64)
    positions = torch.zeros_like(input_ids)
    owner = torch.full_like(input_ids, -1)  # 0: the prompt; k: the k-th response; -1: padding
    start_of = [0] * len(ids)  # where the sequence's first response token lies in its row
    row_of = [0] * len(ids)
    for row, group in enumerate(groups):
        prompt = first[group[0]]
        input_ids[row, :prompt] = ids[group[0], :prompt]
        positions[row, :prompt] = torch.arange(prompt)
        owner[row, :prompt] = 0
        at = prompt
        for number, index in enumerate(group, start=1):
            count = ends[index] - prompt
            input_ids[row, at : at + count] = ids[index, prompt : ends[index]]
            positions[row, at : at + count] = torch.arange(prompt, ends[index])
            owner[row, at : at + count] = number
            row_of[index], start_of[index] = row, at
            at += count
    sequence, position = mask.nonzero(as_tuple=True)  # [M], [M]
    prompt_length, offset = torch.tensor(first)[sequence], position - 1 - torch.tensor(first)[sequence]
    column = torch.where(offset < 0, prompt_length - 1, torch.tensor(start_of)[sequence] + offset)
    layout = Layout(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=_visibility(owner),
        source=torch.tensor(row_of)[sequence] * length + column,
        sequence=sequence,
        position=position,
        targets=ids[sequence, position],
    )
    if device.type == "cpu":
        return layout
    fields = {name: getattr(layout, name) for name in Layout.__slots__}
    return Layout(**{name: value if value is None else value.to(device) for name, value in fields.items()})


def _visibility(owner: Tensor) -> Tensor | None:
    """[R, 1, S, S]: a token sees the prompt and its own response, up to itself. Padding sees padding: never empty."""
    if owner.min() >= 0 and owner.max() <= 1:
        return None
    query, key = owner[:, :, None], owner[:, None, :]
    causal = torch.ones(owner.shape[1], owner.shape[1], dtype=torch.bool).tril()
    return (((key == 0) | (query == key)) & causal)[:, None]
