"""A plan of an evaluation counts the samples and the length of that evaluation, and says what sets them."""

from __future__ import annotations

import json
import sys

import pytest
from planning import composed, planned

from orbit_cli import cli
from orbit_cli.errors import ConfigError
from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.largest import longest_response, longest_words
from orbit_cli.planner.plan import Plan
from orbit_cli.planner.preflight import preflight

QWEN = ("model=qwen3_4b", "hardware=rtx4090x1")
EIGHT = ("evaluation.prompts=8", "evaluation.samples=4")
SHORT = (*QWEN, *EIGHT, "rollout.max_new_tokens=39000", "evaluation.max_new_tokens=1000")
LONG = (*QWEN, *EIGHT, "rollout.max_new_tokens=100", "evaluation.max_new_tokens=30000")


def evaluation(*overrides: str) -> Plan:
    return planned(*overrides, trains=False, evaluates=True)


def test_its_own_samples_and_length_are_counted() -> None:
    found = evaluation(*SHORT).lengths
    assert (found.longest, found.running, found.in_flight) == (128 + 1000, 32, 32 * 1128)
    found = evaluation(*QWEN, "rollout.max_new_tokens=700", "evaluation.prompts=100").lengths
    assert (found.longest, found.running) == (128 + 700, 64)  # no length of its own: that of sampling
    turns = evaluation(*SHORT, "environment=guess_number").lengths
    assert turns.longest == 128 + 1000 * composed("environment=guess_number").environment.max_turns


def test_lengths_of_training_refuse_no_evaluation_and_hide_none() -> None:
    """Without model files both are refused in the end: what fits is told of the files that it lacks."""
    assert evaluation(*SHORT).fits and not planned(*SHORT, trains=False).fits
    assert planned(*LONG, trains=False).fits and not evaluation(*LONG).fits
    for overrides, command, sentence in (
        (SHORT, "eval", "of files, which are not part of Orbit"),
        (SHORT, "rollout", "does not fit"),
        (LONG, "rollout", "of files, which are not part of Orbit"),
        (LONG, "eval", "does not fit .*`orbit plan --for eval "),
    ):
        with pytest.raises(ConfigError, match=sentence):
            preflight(composed(*overrides), command=command, overrides=overrides)


def test_what_is_told_to_be_set_is_the_evaluations_length() -> None:
    plan = evaluation(*SHORT)
    tokens = longest_response(plan, trains=False)
    assert f"(evaluation.max_new_tokens={tokens})" in longest_words(plan, trains=False)
    assert evaluation(*SHORT, f"evaluation.max_new_tokens={tokens}").fits
    assert not evaluation(*SHORT, f"evaluation.max_new_tokens={tokens + 1}").fits
    shared = (*QWEN, *EIGHT, "rollout.max_new_tokens=1000")
    assert f"(rollout.max_new_tokens={tokens})" in longest_words(evaluation(*shared), trains=False)

    small = (*LONG, "hardware.memory_mib=8000", "engine.max_running_requests=1")
    found = nearest_fit(evaluation(*small), trains=False)
    assert found is not None and found.plan.fits
    assert any(text.startswith("evaluation.max_new_tokens=") for text in found.overrides)
    assert not any(text.startswith("rollout.") for text in found.overrides)
    assert evaluation(*small, *found.overrides).fits


@pytest.mark.parametrize("command", [["plan", "--for=eval"], ["eval"]])
def test_an_evaluation_of_nothing_is_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a run that was trained without evaluations."""
    monkeypatch.setattr(sys, "argv", ["orbit", *command, "model=tiny_dense", "evaluation.prompts=0"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "evaluation.prompts=0 leaves nothing to evaluate; set evaluation.prompts" in capsys.readouterr().err


def test_the_command_plans_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["orbit", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == (1 if "--for=rollout" in arguments else 0)
        return " ".join(capsys.readouterr().out.split())

    text = told("--for=eval", *SHORT)
    assert "128 prompt + 1,000 response tokens a sequence, 32 sequences at once in sampling MB" in text
    assert "yes, for prompts of 128 and responses of 1,000 tokens" in text
    assert "128 prompt + 39,000 response tokens a sequence" in told("--for=rollout", *SHORT)
    found = json.loads(told("--for=eval", "--json", *SHORT))
    assert found["longest_response_overrides"][0].startswith("evaluation.max_new_tokens=")
