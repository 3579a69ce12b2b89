"""The limit of the log-prob gap: what rounding explains passes, another base does not."""

from __future__ import annotations

import pytest
import torch

from orbit_cli.config.compose import compose
from orbit_cli.errors import ParityError
from orbit_cli.sync.parity import gap_limit, trainer_scores
from orbit_cli.sync.publisher import Publisher
from orbit_cli.trainer.loop import check_gap

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


class Engine:
    """Scores as the trainer does, with an error of a given mean size."""

    def __init__(self, model, error: float) -> None:
        self.model, self.error = model, error

    def base_checksum(self) -> str:
        return "same"

    def score(self, token_ids, version):
        scores = trainer_scores(self.model, token_ids, adapter=False)
        signs = torch.arange(len(scores)) % 2 * 2 - 1
        return (scores + self.error * signs).view(len(token_ids), -1).tolist()


def check_base(model, overrides: list[str], error: float):
    config = compose(overrides)
    return Publisher(Engine(model, error), model, TOKENS, config.sync, gap_limit(config)).check_base()


def test_rounding_of_bfloat16_does_not_stop_the_main_job_on_a_gpu(make_model) -> None:
    assert check_base(make_model(), ["hardware=h200x1"], 0.11).gap_mean == pytest.approx(0.11)
    check_gap({"logprob_gap_mean": 0.11}, compose(["hardware=h200x1"]))


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["hardware=h200x1"], 0.2),
        ([], 0.02),
        (["hardware=h200x1", "model.dtype=float32"], 0.02),
        (["hardware=h200x1", "sync.max_mean_gap=0.01"], 0.02),
    ],
)
def test_a_larger_gap_stops_it(make_model, overrides: list[str], error: float) -> None:
    with pytest.raises(ParityError, match=r"mean \|log-prob gap\| 0\.\d+ is above 0\.\d+ \(sync\.max_mean_gap\)"):
        check_base(make_model(), overrides, error)
    with pytest.raises(ParityError, match=r"above 0\.\d+ \(sync\.max_mean_gap\)"):
        check_gap({"logprob_gap_mean": error}, compose(overrides))
