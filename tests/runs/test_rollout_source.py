"""Dynamic sampling replaces groups that teach nothing, for a bounded number of rounds, and counts what it dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.rollout.source import RolloutSource
from orbit_cli.telemetry.names import unknown
from orbit_cli.types import FinishReason, Trajectory


class Scripted:
    """A generator whose samples of a prompt are right as the outcomes of its number say, over and over."""

    def __init__(self, outcomes: list[tuple[bool, bool]]) -> None:
        self._outcomes = outcomes

    def sampling(self, *limits: Any) -> None:
        return None

    def sample(self, prompts: list[int], **how: Any) -> list[Trajectory]:
        return [
            sampled(group, number, right)
            for group, number in enumerate(prompts)
            for right in self._outcomes[number % len(self._outcomes)]
        ]


def sampled(group: int, number: int, right: bool) -> Trajectory:
    return Trajectory(
        prompt_id=str(number),
        group=group,
        sample=0,
        token_ids=[5, 6],
        policy_mask=[False, True],
        logprobs=[0.0, -0.1],
        versions=[None, 0],
        reward=float(right),
        reward_parts={},
        finish_reason=FinishReason.stop,
        text="",
        correct=right,
    )


WRONG, MIXED = (False, False), (True, False)


@pytest.mark.parametrize(
    ("outcomes", "dynamic", "rounds", "groups", "discarded", "informative"),
    [
        ([MIXED], True, 1, 3, 0, 3),
        ([WRONG, MIXED, MIXED], True, 3, 3, 2, 3),  # 1 of 3 dropped, then 1 of 1, then one that is kept
        ([WRONG], True, 4, 3, 9, 0),  # the last round is taken as it is
        ([WRONG], False, 1, 3, 0, 0),
    ],
)
def test_rounds_and_groups_are_counted(
    outcomes: list[tuple[bool, bool]], dynamic: bool, rounds: int, groups: int, discarded: int, informative: int
) -> None:
    config = compose(
        ["rollout.prompts_per_step=3", "rollout.group_size=2", f"algorithm.dynamic_sampling={str(dynamic).lower()}"]
    )
    engine = SimpleNamespace(flush_cache=lambda: None)
    environment = SimpleNamespace(train_prompt=lambda index: index)
    source = RolloutSource(engine, environment, Scripted(outcomes), config)
    found = source.sample(0, 0, 0).metrics
    names = ("sampling_rounds", "groups", "groups_discarded", "groups_informative")
    assert [found[name] for name in names] == [rounds, groups, discarded, informative]
    assert found["samples"] == 2 * (groups + discarded) and not unknown([found])
