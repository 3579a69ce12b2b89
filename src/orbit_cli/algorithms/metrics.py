"""Joining the metrics of micro-batches, so that they are those of the batch whatever the split.

The rule is in the name: `tokens` is a sum, `*_mean` and `*_fraction` are means over tokens, `*_min` and `*_max` are
what they say. Naming metrics for people, and writing them, is telemetry's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of the union of disjoint parts, each with its own `tokens`.

    Raises:
        ValueError: no parts, or a name whose ending does not say how to join it.
    """
    if not parts:
        raise ValueError("there are no metrics to merge")
    tokens = torch.stack([part["tokens"] for part in parts]).double()  # [parts]
    return {name: _merge_one(name, torch.stack([p[name].double() for p in parts]), tokens) for name in parts[0]}


def _merge_one(name: str, values: Tensor, tokens: Tensor) -> Tensor:
    if name == "tokens":
        return tokens.sum()
    if name.endswith(("_mean", "_fraction")):
        return (values * tokens).sum() / tokens.sum().clamp_min(1)
    if name.endswith("_min"):
        return values.min()
    if name.endswith("_max"):
        return values.max()
    raise ValueError(f"metric {name} ends in none of _mean, _fraction, _min, _max")
