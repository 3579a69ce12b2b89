"""Trajectories as tensors: masks come from what was sampled, splits keep every row, groups stay together."""

import torch

from orbit_cli.trainer.batch import make_batch, micro_batches, mini_batches
from orbit_cli.trainer.optimizer import learning_rate
from orbit_cli.types import FinishReason, Trajectory


def trajectory(tokens: list[int], prompt: int, group: int = 0, sample: int = 0) -> Trajectory:
    mask = [False] * prompt + [True] * (len(tokens) - prompt)
    return Trajectory(
        prompt_id=str(group),
        group=group,
        sample=sample,
        token_ids=tokens,
        policy_mask=mask,
        logprobs=[-0.5] * len(tokens),
        versions=[0] * len(tokens),
        reward=1.0,
        reward_parts={},
        finish_reason=FinishReason.stop,
        text="",
    )


def test_padding_that_equals_a_sampled_token_is_told_apart_by_the_record():
    # token 0 is sampled as end of turn and is the padding value too (TRL PR 6357)
    batch = make_batch([trajectory([5, 6, 0, 0], 2), trajectory([5, 0, 0], 1)], torch.ones(2), [True, True])
    assert batch.mask.tolist() == [[False, False, True, True], [False, True, True, False]]
    assert batch.rollout_logprobs[0].tolist() == [0.0, 0.0, -0.5, -0.5]
    assert batch.lengths.tolist() == [4, 3]


def test_samples_out_of_the_loss_have_no_mask():
    batch = make_batch([trajectory([5, 6, 7], 1), trajectory([5, 6, 7], 1)], torch.ones(2), [True, False])
    assert batch.mask.sum(1).tolist() == [2, 0]


def test_micro_batches_cover_every_row_once_within_the_budget():
    lengths = [3, 20, 7, 9, 40, 2, 11]
    batch = make_batch([trajectory(list(range(n)), 1) for n in lengths], torch.ones(7), [True] * 7)
    groups = list(micro_batches(batch, range(7), token_budget=40))
    assert sorted(row for group in groups for row in group) == list(range(7))
    assert all(len(g) * max(lengths[r] for r in g) <= 40 for g in groups)


def test_mini_batches_keep_groups_whole():
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    parts = mini_batches(groups, 2)
    assert sorted(row for part in parts for row in part) == list(range(10))
    seen = [{groups[row] for row in part} for part in parts]
    assert seen[0].isdisjoint(seen[1])


def test_select_cuts_to_the_longest_row():
    batch = make_batch([trajectory([1, 2], 1), trajectory([1, 2, 3, 4], 1)], torch.ones(2), [True, True])
    assert batch.select([0]).token_ids.shape == (1, 2)


def test_schedules(trainer_config):
    config = trainer_config(steps=10, learning_rate=2.0, warmup_steps=2, schedule="linear")
    rates = [learning_rate(config, step) for step in range(10)]
    assert rates[:3] == [1.0, 2.0, 2.0]
    assert rates[-1] == 2.0 * (1 - 7 / 8)
    assert all(a >= b for a, b in zip(rates[2:], rates[3:], strict=False))
    cosine = trainer_config(steps=10, learning_rate=2.0, schedule="cosine")
    assert learning_rate(cosine, 0) == 2.0
    assert abs(learning_rate(cosine, 5) - 1.0) < 1e-12
