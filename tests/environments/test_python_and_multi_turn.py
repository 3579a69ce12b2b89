"""Environments by import path, and a whole multi-turn game."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from orbit_cli.errors import ConfigError

GAME = "orbit_cli.environments.guess_number:GuessNumber"


@pytest.fixture(autouse=True)
def user_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def game(make_environment):
    return functools.partial(make_environment, "python", target=GAME, reward="task", max_turns=5)


def play(environment, prompt, policy):
    """The conversation and final step of a policy: a function of the messages so far."""
    messages, responses = list(prompt.messages), []
    while True:
        responses.append(policy(messages))
        step = environment.step(prompt, responses)
        messages += [{"role": "assistant", "content": responses[-1]}, *step.messages]
        assert (step.grade is None) != step.done
        if step.done:
            return messages, step


def bisect(prompt):
    bounds = [prompt.metadata["low"], prompt.metadata["high"]]

    def policy(messages):
        if messages[-1]["content"] == "Higher.":
            bounds[0] = int(messages[-2]["content"]) + 1
        if messages[-1]["content"] == "Lower.":
            bounds[1] = int(messages[-2]["content"]) - 1
        return str(sum(bounds) // 2)

    return policy


def test_bisection_wins_every_game(game):
    environment = game()
    for index in range(30):
        prompt = environment.train_prompt(index)
        messages, step = play(environment, prompt, bisect(prompt))
        assert step.grade.correct and step.grade.reward == 1.0
        assert messages[-1] == {"role": "assistant", "content": prompt.answer}
        assert step.grade.parts["guesses"] == (len(messages)) // 2


def test_a_policy_that_ignores_the_hints_loses_after_max_turns(game):
    environment = game()
    prompt = environment.train_prompt(0)
    messages, step = play(environment, prompt, lambda _: "I do not know")
    assert [m["content"] for m in messages[2::2]] == ["Answer with one number."] * 4
    assert step.grade.reward == 0.0 and step.grade.answer is None and step.grade.error is None
    assert len(messages) == 10


def test_a_step_depends_on_the_responses_alone(game):
    one, other = game(seed=8), game(seed=8)
    prompt = one.train_prompt(3)
    assert prompt == other.train_prompt(3) != game(seed=9).train_prompt(3)
    responses = ["1", "60"]
    assert one.step(prompt, responses) == other.step(prompt, responses)


def test_games_are_held_out(game):
    environment = game()
    train = {(p.metadata["low"], p.metadata["secret"]) for p in map(environment.train_prompt, range(2000))}
    held_out = [(p.metadata["low"], p.metadata["secret"]) for p in environment.eval_prompts(64)]
    assert len(set(held_out)) == 64 and train.isdisjoint(held_out)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_turns": 1}, "environment.max_turns=1"),
        ({"params": {"span": 2}}, "span=2"),
        ({"params": {"spam": 2}}, "it takes span, highest_start"),
        ({"target": GAME + "s"}, "it has GuessNumber"),
        ({"target": "environments_under_test:A_NUMBER"}, "is no class but a int"),
        ({"target": "environments_under_test:Half"}, "lacks max_turns, train_prompt, eval_prompts, close"),
        ({"target": "environments_under_test:Echo"}, "missing a required argument: 'word'"),
    ],
)
def test_bad_input_is_one_sentence(game, fields, said):
    with pytest.raises(ConfigError, match=said):
        game(**fields)


def test_too_many_held_out_games_are_refused(game):
    with pytest.raises(ConfigError, match="more than the"):
        game(params={"span": 4, "highest_start": 2}).eval_prompts(50)


def test_a_users_environment_is_given_the_grader_and_the_templates(make_environment):
    environment = make_environment(
        "python",
        target="environments_under_test:Echo",
        params={"word": "hey", "times": 2},
        prompt_template="Please: {prompt}.",
    )
    prompt = environment.train_prompt(0)
    assert prompt.messages == [{"role": "user", "content": "Please: Say hey hey."}]
    assert environment.step(prompt, ["hey hey"]).grade.correct
