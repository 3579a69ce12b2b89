"""What the loop does in which order, where the order is what a kill would show."""

import contextlib
from types import SimpleNamespace

import pytest

from orbit_cli.trainer.loop import evaluate


def test_an_evaluation_is_on_record_only_when_its_adapter_is_exported():
    """A run that was killed in between evaluates again: else the adapter of that step would be missing for good."""
    recorded = []
    recorder = SimpleNamespace(phase=lambda _: contextlib.nullcontext(), evaluation=lambda *row: recorded.append(row))

    def killed(version: int) -> None:
        raise KeyboardInterrupt

    session = SimpleNamespace(
        recorder=recorder,
        source=SimpleNamespace(evaluate=lambda version: version),
        state=SimpleNamespace(version=3, step=3),
        export=killed,
    )
    with pytest.raises(KeyboardInterrupt):
        evaluate(session)
    assert recorded == []
    session.export = lambda version: None
    assert evaluate(session) == 3 and recorded == [(3, 3)]
