"""A stop waits for the step in progress only once there is one."""

from __future__ import annotations

import os
import signal

import pytest

from orbit_cli.trainer.interrupt import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_training_the_first_signal_stops_at_once(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_training_the_first_signal_is_a_request_and_the_second_stops(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        stop.begin()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
