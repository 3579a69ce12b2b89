"""Reasoning-gym tasks: deterministic, disjoint from the held-out ones, scored, and refused with a sentence."""

from __future__ import annotations

import functools
import pickle
import random

import numpy as np
import pytest

from orbit_cli.environments.protocol import is_held_out
from orbit_cli.errors import ConfigError

SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture
def sums(make_environment):
    return functools.partial(make_environment, "reasoning_gym", task="chain_sum", params=SMALL_SUMS)


def question(prompt):
    return prompt.messages[-1]["content"]


def test_a_prompt_is_a_function_of_seed_and_index(sums):
    one, other, elsewhere = sums(seed=3), sums(seed=3), sums(seed=4)
    order = [7, 0, 300, 7, 2]
    assert [one.train_prompt(i) for i in order] == [other.train_prompt(i) for i in order]
    same = [question(one.train_prompt(i)) == question(elsewhere.train_prompt(i)) for i in range(40)]
    shifted = [question(one.train_prompt(i + 1)) == question(elsewhere.train_prompt(i)) for i in range(40)]
    assert sum(same) < 10 and sum(shifted) < 10


def test_training_and_held_out_questions_are_disjoint_even_in_a_tiny_space(sums):
    environment = sums()
    train = {question(environment.train_prompt(i)) for i in range(600)}
    held_out = [question(p) for p in environment.eval_prompts(24)]
    assert len(set(held_out)) == 24
    assert train.isdisjoint(held_out)
    assert len(train) > 100  # of 200 questions, 3 in 4


def test_held_out_prompts_are_the_same_for_every_seed_and_a_prefix_of_more(sums):
    assert sums(seed=1).eval_prompts(5) == sums(seed=2).eval_prompts(9)[:5]


def test_tasks_repeat_after_size(sums):
    environment = sums(size=10)
    assert [environment.train_prompt(i) for i in range(10)] == [environment.train_prompt(i) for i in range(10, 20)]


def test_prompt_has_answer_messages_and_template(sums):
    environment = sums(system_prompt="Be brief.", prompt_template="{prompt} Use \\frac{1}{2}.")
    prompt = environment.train_prompt(0)
    assert prompt.id == "test/train/0" and prompt.environment == "test"
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}
    text = prompt.metadata["entry"]["question"]
    assert prompt.messages[1] == {"role": "user", "content": f"{text} Use \\frac{{1}}{{2}}."}
    assert prompt.answer == str(eval(prompt.metadata["entry"]["metadata"]["expression"]))


@pytest.mark.parametrize("reward", ["exact", "task"])
def test_step_grades_the_last_response(sums, reward):
    environment = sums(reward=reward)
    prompt = environment.train_prompt(0)
    right, wrong = (environment.step(prompt, [text]) for text in (f" {prompt.answer}", "no idea"))
    assert right.done and right.messages == [] and right.grade.correct and right.grade.reward == 1.0
    assert wrong.done and wrong.grade.correct is False and wrong.grade.error is None


def test_items_from_global_generators_are_reproducible_and_leave_them_alone(make_environment):
    # list_functions draws from the global `random`, pool_matrix reseeds numpy's.
    for task in ("list_functions", "pool_matrix"):
        one = make_environment("reasoning_gym", task=task)
        random.seed(5), np.random.seed(6)
        states = random.getstate(), np.random.get_state()[1].tolist()
        first = one.train_prompt(11)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states
        random.seed(99)
        assert make_environment("reasoning_gym", task=task).train_prompt(11) == first


def test_tasks_of_all_kinds_make_picklable_prompts_that_their_own_score_accepts(make_environment):
    tasks = {"spell_backward", "letter_counting", "leg_counting", "countdown", "knights_knaves", "mini_sudoku"}
    environment = make_environment(
        "reasoning_gym", task="composite", params={"datasets": [{"name": name} for name in tasks]}, reward="task"
    )
    prompts = environment.eval_prompts(24)
    assert {p.metadata["entry"]["metadata"]["source_dataset"] for p in prompts} == tasks
    assert all(is_held_out(p.metadata["entry"]["question"]) for p in prompts)
    assert pickle.loads(pickle.dumps(prompts)) == prompts
    assert [environment.step(p, [p.answer]).grade.reward for p in prompts] == [1.0] * 24


def test_composite_tasks_are_written_as_plain_data(make_environment):
    parts = [{"name": "leg_counting"}, {"name": "chain_sum", "weight": 2.0, "config": SMALL_SUMS}]
    environment = make_environment("reasoning_gym", task="composite", params={"datasets": parts})
    prompts = [environment.train_prompt(i) for i in range(60)]
    sources = [p.metadata["entry"]["metadata"]["source_dataset"] for p in prompts]
    assert set(sources) == {"leg_counting", "chain_sum"}
    assert sources.count("chain_sum") > sources.count("leg_counting")  # it weighs twice as much


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum"),
        ({"params": {"max_term": 3}}, "did you mean max_terms"),
        ({"params": {"seed": 3}}, "set seed instead"),
        ({"params": {"size": 3}}, "set environment.size instead"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"size": 0}, "environment.size=0"),
        ({"max_turns": 0}, "environment.max_turns=0"),
        ({"task": "composite", "params": {"datasets": [{"nam": "chain_sum"}]}}, "composite"),
        ({"task": "composite"}, "composite"),
    ],
)
def test_bad_input_is_one_sentence(make_environment, fields, said):
    with pytest.raises(ConfigError, match=said):
        make_environment("reasoning_gym", **({"task": "chain_sum"} | fields))


def test_more_held_out_prompts_than_there_are_is_refused(sums):
    with pytest.raises(ConfigError, match="evaluation.prompts=150 is more than the"):
        sums().eval_prompts(150)


def test_every_registered_task_has_parameters_that_are_known_by_name():
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 90
