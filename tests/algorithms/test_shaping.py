"""Length shaping, overlong masks, and dynamic sampling on the raw outcome."""

from __future__ import annotations

import pytest
import torch

from orbit_cli.algorithms.shaping import informative_groups, overlong_mask, overlong_penalty


def test_overlong_penalty_golden(golden):
    lengths = torch.tensor([int(n) for n in golden["overlong"]])
    penalty = overlong_penalty(lengths, max_length=20480, buffer=4096)
    assert penalty.tolist() == list(golden["overlong"].values())


@pytest.mark.parametrize("buffer", [0, 11])
def test_an_impossible_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match=str(buffer)):
        overlong_penalty(torch.tensor([3]), max_length=10, buffer=buffer)


def test_overlong_mask_removes_truncated_rows_only():
    mask = torch.tensor([[True, False], [True, True]])
    assert overlong_mask(mask, torch.tensor([True, False])).tolist() == [[False, False], [True, True]]


def test_dynamic_sampling_looks_at_the_outcome_not_at_shaped_rewards():
    groups = torch.tensor([4, 4, 4, 4, 2, 2, 2, 2, 3, 3, 3, 3])
    raw = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1])
    shaped = raw + torch.tensor([0, -0.2, -0.9, -1.0] * 3)
    assert len(set(shaped[:4].tolist())) == 4  # a filter on shaped rewards would keep the all-wrong group
    keep = informative_groups(raw.bool(), groups, torch.ones(12, dtype=torch.bool))
    assert keep.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_ungraded_samples_neither_make_nor_break_a_group():
    correct = torch.tensor([True, False, True, False, True, True, False])
    valid = torch.tensor([True, False, True, True, True, False, True])
    keep = informative_groups(correct, torch.tensor([0, 0, 0, 1, 1, 2, 2]), valid)
    assert keep.tolist() == [False, False, False, True, True, False, False]
