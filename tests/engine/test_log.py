"""The exception that an engine died of, found in its log."""

from pathlib import Path

import pytest

from orbit_cli.engine.log import last_exception, log_size, one_line

SCHEDULER = """\
Loading shards:   0% 0/1[2026-11-30 22:56:11] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 4931, in run
    scheduler = Scheduler(
                ^^^^^^^^^^
RuntimeError: start (0) + length (128) exceeds dimension size (32).

[2026-11-30 22:56:11] Received sigquit from a child process. It usually means the child failed.
Loading shards:   0% Completed
"""
INDENTED = """\
Traceback (most recent call last):
  File "x.py", line 1, in x
    raise E
huggingface_hub.errors.StrictDataclassFieldValidationError: Validation error for field 'rms_norm_eps':
    TypeError: Field 'rms_norm_eps' expected float, got str (value: 'abc')
"""
CASES = [
    (SCHEDULER, "RuntimeError: start (0) + length (128) exceeds dimension size (32)"),
    (
        INDENTED,
        "StrictDataclassFieldValidationError: Validation error for field 'rms_norm_eps': "
        "TypeError: Field 'rms_norm_eps' expected float, got str (value: 'abc')",
    ),
    (
        INDENTED + "\nDuring handling ...\n\n" + SCHEDULER,
        "RuntimeError: start (0) + length (128) exceeds dimension size (32)",
    ),
    ("Traceback (most recent call last):\n  File\nKeyboardInterrupt\n", "KeyboardInterrupt"),
    ("[22:56] INFO loading\nNote: nothing happened\n", None),
    ("Traceback (most recent call last):\n  File", None),
]


@pytest.mark.parametrize(("text", "told"), CASES)
def test_the_last_exception(tmp_path: Path, text: str, told: str | None) -> None:
    (tmp_path / "log").write_text(text)
    assert last_exception(tmp_path / "log") == told


def test_an_earlier_engine_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(SCHEDULER)
    assert last_exception(tmp_path / "log", log_size(tmp_path / "log")) is None
    assert last_exception(tmp_path / "none", log_size(tmp_path / "none")) is None


def test_a_message_is_one_line() -> None:
    assert one_line("a\n  b.") == "a b"
    assert len(one_line("x" * 5000)) == 600
