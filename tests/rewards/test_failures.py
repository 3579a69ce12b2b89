"""Graders that raise, hang, crash or return nonsense: a counted failure each, and the next grade is right again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def moody(make_grader):
    return make_grader("python", function="graders_under_test:misbehave", timeout_s=TIMEOUT_S, workers=2)


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raise", "KeyError: 'no such entry'"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("nothing", "returned None"),
        ("text", "could not convert"),
        ("exit", "died"),
        ("crash", "died"),
        ("hang", "took longer than 1 s"),
    ],
)
def test_a_failure_is_counted_and_passes(moody, make_prompt, response, said):
    grade = moody.grade(response, make_prompt())
    assert grade.reward is None and grade.correct is None and grade.parts == {}
    assert said in grade.error
    assert moody.grade("well behaved", make_prompt()).reward == 1.0


def test_one_hanging_grader_does_not_hold_up_the_others(moody, make_prompt):
    start = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(lambda r: moody.grade(r, make_prompt()), ["hang"] + ["fine"] * 40))
    assert [g.reward for g in grades] == [None] + [1.0] * 40
    assert time.monotonic() - start < 30


def test_what_a_grader_prints_does_not_reach_the_output(moody, make_prompt, capfd):
    assert moody.grade("print", make_prompt()).reward == 1.0
    assert capfd.readouterr().out == ""


def test_children_of_a_hanging_grader_end_with_it(moody, make_prompt, tmp_path):
    note = tmp_path / "pid"
    assert moody.grade(f"hang with child {note}", make_prompt()).reward is None
    assert wait_for(lambda: not is_running(int(note.read_text())))


def test_a_regular_expression_that_backtracks_for_ever_is_stopped(make_grader, make_prompt):
    grader = make_grader("regex", pattern=r"(a+)+b", timeout_s=TIMEOUT_S)
    start = time.monotonic()
    grade = grader.grade("a" * 60, make_prompt())
    assert "took longer" in grade.error
    assert time.monotonic() - start < 60  # one process start included
    assert grader.grade("aab", make_prompt("aa")).reward == 1.0


def test_a_prompt_that_cannot_travel_is_a_failure(moody, make_prompt):
    grade = moody.grade("fine", make_prompt(callback=lambda: None))
    assert grade.reward is None and grade.error
    assert moody.grade("fine", make_prompt()).reward == 1.0


def test_a_closed_grader_says_so(make_grader, make_prompt):
    grader = make_grader("python", function="graders_under_test:length")
    assert grader.grade("abc", make_prompt()).reward == 3.0
    grader.close()
    assert grader.grade("abc", make_prompt()).error == "the grader is closed"


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    """Even a worker that is hanging at that moment ends soon after: by its own alarm."""
    script = textwrap.dedent(
        """
        import os, signal, subprocess, sys, threading, time
        from orbit_cli.config.schema.learning import RewardConfig, RewardKind
        from orbit_cli.rewards.grade import build_grader
        from orbit_cli.types import Prompt

        prompt = Prompt(id="1", messages=[], answer="5", environment="e")
        config = RewardConfig(kind=RewardKind.python, function="graders_under_test:misbehave", timeout_s=1.0)
        idle, busy = build_grader(config, workers=1), build_grader(config, workers=1)
        threading.Thread(target=busy.grade, args=("hang", prompt), daemon=True).start()
        time.sleep(0.3)
        print(*subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "orbit_cli.rewards.worker"],
                              capture_output=True, text=True).stdout.split(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    workers = [int(pid) for pid in result.stdout.split()]
    assert len(workers) == 2, result.stderr
    assert wait_for(lambda: not any(map(is_running, workers)), seconds=20)
