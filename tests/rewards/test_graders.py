"""What each kind of reward says of right, wrong and answerless responses."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from orbit_cli.config.schema.learning import RewardConfig, RewardKind
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.grade import Grade, build_grader
from orbit_cli.rewards.reasoning_gym_task import TaskSpec


@pytest.mark.parametrize(
    ("extract", "response", "reward", "answer"),
    [
        (None, " 5\n", 1.0, "5"),
        (None, "The answer is 5", 0.0, "The answer is 5"),
        (None, "", 0.0, ""),
        (r"answer is (\d+)", "the answer is 4. No, the answer is 5.", 1.0, "5"),
        (r"answer is (\d+)", "5", 0.0, None),
    ],
)
def test_exact(make_grader, make_prompt, extract, response, reward, answer):
    grade = make_grader("exact", extract=extract).grade(response, make_prompt(" 5 "))
    assert grade == Grade(reward=reward, parts={"exact": reward}, answer=answer, correct=reward == 1.0)


@pytest.mark.parametrize(
    ("pattern", "response", "reward", "answer"),
    [
        (r"(\d+)\.?", " 5. ", 1.0, "5"),
        (r"(\d+)\.?", "4", 0.0, "4"),
        (r"(\d+)\.?", "it is 5", 0.0, None),
        (r"[a-z ]+", "only small letters", 1.0, "only small letters"),
    ],
)
def test_regex(make_grader, make_prompt, pattern, response, reward, answer):
    grade = make_grader("regex", pattern=pattern).grade(response, make_prompt("5"))
    assert (grade.reward, grade.answer) == (reward, answer)


@pytest.fixture(scope="module")
def math_grader(make_grader):
    return make_grader("math", timeout_s=60.0)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"\boxed{\frac13}", "1/3", 1.0),
        (r"\boxed{1/3}", r"\frac13", 1.0),
        (r"\boxed{0.3333}", "1/3", 0.0),
        (r"\boxed{4} no, \boxed{5}", "5", 1.0),
        (r"\boxed{5} no, \boxed{4}", "5", 0.0),
        (r"\boxed{2x + x}", "3x", 1.0),
        (r"\boxed{12}", r"so it is \boxed{12}", 1.0),
        ("5", "5", 0.0),
        (r"\boxed{}", "5", 0.0),
    ],
)
def test_math(math_grader, make_prompt, response, answer, reward):
    grade = math_grader.grade(response, make_prompt(answer))
    assert (grade.reward, grade.error) == (reward, None)


def test_equal_mathematical_answers_are_equal_votes(math_grader, make_prompt):
    votes = {math_grader.grade(rf"\boxed{{{text}}}", make_prompt("1/3")).answer for text in ("1/3", r"\frac13", "2/6")}
    assert len(votes) == 1


def test_math_works_in_threads_and_asyncio(math_grader, make_prompt):
    pairs = [(rf"\boxed{{{n}}}", make_prompt(str(n % 7))) for n in range(14)]
    expected = [float(n == n % 7) for n in range(14)]
    with ThreadPoolExecutor(4) as threads:
        assert [g.reward for g in threads.map(lambda pair: math_grader.grade(*pair), pairs)] == expected

    async def in_loop():
        return await asyncio.gather(*(asyncio.to_thread(math_grader.grade, *pair) for pair in pairs))

    assert [grade.reward for grade in asyncio.run(in_loop())] == expected


def test_math_with_extract_needs_no_box(make_grader, make_prompt):
    grader = make_grader("math", extract=r"Answer: (.*)", timeout_s=60.0)
    assert grader.grade("Answer: 2/6", make_prompt("1/3")).reward == 1.0
    assert grader.grade(r"\boxed{1/3}", make_prompt("1/3")).reward == 0.0


def test_an_answer_that_is_no_mathematics_is_a_failure_not_a_zero(math_grader, make_prompt):
    grade = math_grader.grade(r"\boxed{5}", make_prompt(""))
    assert grade.reward is None and grade.correct is None
    assert "cannot be parsed" in grade.error


@pytest.mark.parametrize("kind", ["exact", "math"])
def test_a_prompt_without_answer_is_a_failure(make_grader, make_prompt, kind):
    grade = make_grader(kind, timeout_s=60.0).grade(r"\boxed{5}", make_prompt(None))
    assert grade.reward is None and "no answer" in grade.error


def test_task_score_is_the_tasks_own(make_grader, make_prompt):
    grader = make_grader("task", task=TaskSpec("chain_sum", {"max_terms": 2}), timeout_s=60.0)
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}
    rewards = {text: grader.grade(text, make_prompt("2", entry=entry)) for text in ("2", "2.0", "+02", "3", "two")}
    assert [g.error for g in rewards.values()] == [None] * 5
    assert [g.correct for g in rewards.values()] == [True, True, True, False, False]


def test_python_function_gets_the_response_and_the_prompt(make_grader, make_prompt):
    grader = make_grader("python", function="graders_under_test:length", correct_above=5)
    assert grader.grade("abc", make_prompt()) == Grade(reward=3.0, parts={"python": 3.0}, answer="abc", correct=False)
    assert grader.grade("abc", make_prompt(extra="de")).correct


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "regex"}, "reward.pattern"),
        ({"kind": "regex", "pattern": "(a"}, "no regular expression"),
        ({"kind": "exact", "extract": "["}, "reward.extract"),
        ({"kind": "task"}, "set exact, math, regex or python"),
        ({"kind": "python"}, "module:function"),
        ({"kind": "python", "function": "graders_under_test.length"}, "module:name"),
        ({"kind": "python", "function": "graders_under_tset:length"}, "No module named"),
        ({"kind": "python", "function": "graders_under_test:lenght"}, "length"),
        ({"kind": "python", "function": "graders_under_test:NOT_CALLABLE"}, "is a int"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_once(make_grader, fields, said):
    kind = fields.pop("kind")
    with pytest.raises(ConfigError, match=said):
        make_grader(kind, **fields)


def test_comparing_strings_starts_no_process(make_prompt):
    threads = threading.active_count()
    grader = build_grader(RewardConfig(kind=RewardKind.exact))
    assert grader.grade("5", make_prompt("5")).correct
    assert threading.active_count() == threads
    grader.close()  # and has nothing to close
    assert grader.grade("5", make_prompt("5")).correct
