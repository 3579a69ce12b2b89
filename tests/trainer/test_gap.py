"""The limit of the log-prob gap: what rounding explains passes, another base does not."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from orbit_cli.config.compose import compose
from orbit_cli.environments.registry import build_environment
from orbit_cli.errors import ParityError
from orbit_cli.rollout.chat import Chat
from orbit_cli.runs.assembly import probe_tokens
from orbit_cli.sync.parity import Probes, moved, tolerance, trainer_scores
from orbit_cli.sync.publisher import Publisher
from orbit_cli.trainer.loop import check_gap, evaluate
from orbit_cli.types import SwapReceipt

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


class Engine:
    """Scores as the trainer does, with an error of a given size on every token and another one on the first."""

    def __init__(self, model, error: float, first: float = 0.0) -> None:
        self.model, self.error, self.first = model, error, first

    def base_checksum(self) -> str:
        return "same"

    def score(self, token_ids, version):
        scores = trainer_scores(self.model, token_ids, adapter=False)
        signs = torch.arange(len(scores)) % 2 * 2 - 1
        scores += self.error * signs
        scores[0] += self.first
        return scores.view(len(token_ids), -1).tolist()


class Stale(Engine):
    """Says that it holds what it is given, and scores every version as the first."""

    def publish(self, version):
        return SwapReceipt(
            version=version.number, checksum=version.checksum, tensors=len(version.tensors), nbytes=0, milliseconds=0.0
        )

    def retire(self) -> None: ...

    def score(self, token_ids, version):
        if not hasattr(self, "served"):
            self.served = super().score(token_ids, version)
        return self.served


class Rounding(Stale):
    """Scores as the trainer does with `factor` times its adapter's movement, plus an error that is never the same."""

    def __init__(self, model, error: float, factor: float) -> None:
        super().__init__(model, error)
        self.factor, self.noise = factor, torch.Generator().manual_seed(4)

    def score(self, token_ids, version):
        base = trainer_scores(self.model, token_ids, adapter=False)
        moved_by = trainer_scores(self.model, token_ids, adapter=version is not None) - base
        scores = base + self.factor * moved_by
        scores += self.error * torch.randn(len(scores), generator=self.noise, dtype=torch.float64)
        return scores.view(len(token_ids), -1).tolist()


def check_base(model, overrides: list[str], error: float, first: float = 0.0):
    config = compose(overrides)
    return Publisher(Probes(Engine(model, error, first), model, TOKENS, tolerance(config)), config.sync).check_base()


def test_rounding_of_bfloat16_does_not_stop_the_main_job_on_a_gpu(make_model) -> None:
    assert check_base(make_model(), ["hardware=h200x1"], 0.11).gap_mean == pytest.approx(0.11)
    check_gap({"logprob_gap_mean": 0.11}, compose(["hardware=h200x1"]))


def test_a_single_token_stops_a_run_in_float32_alone(make_model) -> None:
    assert check_base(make_model(), ["hardware=h200x1"], 0.02, first=9.0).gap_max > 8
    with pytest.raises(ParityError, match=r"is above 0\.01 \(sync\.max_mean_gap\)"):
        check_base(make_model(), [], 0.0, first=0.2)


@pytest.mark.parametrize("overrides", [[], ["hardware=h200x1"]])
def test_a_score_that_is_no_number_stops_it(make_model, overrides: list[str]) -> None:
    with pytest.raises(ParityError, match=r"gap\| inf is above"):
        check_base(make_model(), overrides, 0.0, first=float("nan"))


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["hardware=h200x1"], 0.3),
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


def test_probes_of_which_nothing_is_scored_do_not_pass(make_model) -> None:
    model, config = make_model(), compose([])
    publisher = Publisher(Probes(Engine(model, 0.0), model, [[3], [5]], tolerance(config)), config.sync)
    publisher._engine.score = lambda token_ids, version: [[] for _ in token_ids]
    with pytest.raises(ParityError, match=r"gap\| inf is above"):
        publisher.check_base()


@pytest.mark.parametrize("overrides", [[], ["hardware=h200x1"]])
def test_a_version_that_never_took_effect_is_seen_below_the_gap(make_model, overrides: list[str]) -> None:
    """In bfloat16 a step moves less than the gap; what does not move at all is stale nonetheless."""
    model, config = make_model(scale=0.0), compose(overrides)
    error = tolerance(config).limit / 4
    publisher = Publisher(Probes(Stale(model, error), model, TOKENS, tolerance(config)), config.sync)
    publisher.publish(0)
    model.bank.randomize(seed=1, scale=0.01)
    before, after = (trainer_scores(model, TOKENS, adapter=adapter) for adapter in (False, True))
    assert not overrides or moved(before, after) < 2 * error
    with pytest.raises(ParityError, match="version 1 never took effect"):
        publisher.publish(1)


@pytest.mark.parametrize(("factor", "sound"), [(1.0, True), (0.0, False), (-1.0, False), (0.3, False), (3.0, False)])
def test_an_adapter_that_acts_otherwise_in_the_engine_is_seen_within_the_limit_of_the_gap(make_model, factor, sound):
    """Missing, reversed, weaker, stronger: in bfloat16 the gap alone would let all of them pass."""
    model, config = make_model(scale=0.0), compose(["hardware=h200x1"])
    model.bank.randomize(seed=1, scale=0.05)
    moves = moved(*(trainer_scores(model, TOKENS, adapter=adapter) for adapter in (False, True)))
    publisher = Publisher(Probes(Rounding(model, moves / 20, factor), model, TOKENS, tolerance(config)), config.sync)
    assert abs(factor - 1) * moves < tolerance(config).limit
    publisher.check_base()
    if sound:
        assert publisher.publish(0)["probe_effect"] == pytest.approx(1.0, abs=0.1)
        return
    with pytest.raises(ParityError, match=r"version 0 does not do in the engine .* show -?\d+%"):
        publisher.publish(0)


def test_what_moves_less_than_rounding_does_is_not_compared(make_model) -> None:
    model, config = make_model(scale=0.0), compose(["hardware=h200x1"])
    model.bank.randomize(seed=1, scale=0.05)
    moves = moved(*(trainer_scores(model, TOKENS, adapter=adapter) for adapter in (False, True)))
    publisher = Publisher(Probes(Rounding(model, moves, 0.0), model, TOKENS, tolerance(config)), config.sync)
    publisher.check_base()
    assert "probe_effect" not in publisher.publish(0)


def test_an_evaluation_is_on_record_once_its_adapter_is_on_disk() -> None:
    """A resumed run repeats neither, so a kill in between must leave both to be done."""
    told: list[str] = []
    recorder = SimpleNamespace(phase=lambda name: nullcontext(), evaluation=lambda step, result: told.append("row"))
    source = SimpleNamespace(evaluate=lambda version: None)
    state = SimpleNamespace(step=1, version=1)
    evaluate(SimpleNamespace(recorder=recorder, source=source, state=state, export=lambda v: told.append("adapter")))
    assert told == ["adapter", "row"]


def test_probes_are_beginnings_of_prompts(tiny_base) -> None:
    """A text cut off at its front has three times the rounding in bfloat16, most of it in single tokens."""
    config, base = tiny_base
    chat, environment = Chat(base), build_environment(config.environment, seed=0)
    rows = probe_tokens(config, SimpleNamespace(chat=chat, environment=environment))
    whole = [chat.prompt_tokens(environment.train_prompt(index).messages) for index in range(len(rows))]
    environment.close()
    assert rows == [prompt[: config.sync.probe_tokens] for prompt in whole]
    assert len(set(map(tuple, rows))) == config.sync.probe_prompts  # not only what all prompts begin with


def test_probes_of_prompts_that_begin_alike_are_not_all_the_same(tiny_base) -> None:
    """As those of environment=reasoning_gym are for 58 tokens."""
    config, base = tiny_base
    chat, wanted = Chat(base), config.sync.probe_tokens
    for repeats, longest in ((1, wanted), (8, 2 * wanted), (80, 2 * wanted)):
        texts = ["Read what follows with care. " * repeats + f"Add {index} and seven." for index in range(4)]
        prompts = [SimpleNamespace(messages=[{"role": "user", "content": text}]) for text in texts]
        environment = SimpleNamespace(train_prompt=prompts.__getitem__)
        rows = probe_tokens(config, SimpleNamespace(chat=chat, environment=environment))
        assert max(map(len, rows)) <= longest
        assert len(set(map(tuple, rows))) == (1 if repeats == 80 else 4)
