"""Pairs of numbers: right answers, no answer by place, held-out pairs apart from training."""

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.environments.registry import build_environment
from orbit_cli.errors import ConfigError


def environment(seed: int = 0, *overrides: str):
    return build_environment(compose(["environment=compare_numbers", *overrides]).environment, seed)


def test_answers_are_the_larger_and_stand_in_either_place():
    env = environment()
    prompts = [env.train_prompt(i) for i in range(400)]
    firsts = 0
    for prompt in prompts:
        first, second = prompt.metadata["numbers"]
        assert prompt.answer == str(max(first, second))
        assert f"{first} or {second}?" in prompt.messages[-1]["content"]
        firsts += first > second
    assert 150 < firsts < 250
    env.close()


def test_held_out_pairs_are_never_trained_on():
    env = environment()
    held = {p.messages[-1]["content"] for p in env.eval_prompts(200)}
    assert len(held) == 200
    assert held.isdisjoint(env.train_prompt(i).messages[-1]["content"] for i in range(2000))
    assert [p.id for p in env.eval_prompts(3)] == [p.id for p in environment(5).eval_prompts(3)]
    env.close()


def test_the_last_number_is_graded():
    env = environment()
    prompt = env.train_prompt(0)
    right, wrong = prompt.answer, str(min(prompt.metadata["numbers"]))
    graded = [env.step(prompt, [text]).grade.reward for text in (f"It is {right}.", f"{right}, not {wrong}", "neither")]
    assert graded == [1.0, 0.0, 0.0]
    env.close()


def test_digits_are_checked():
    with pytest.raises(ConfigError, match="digits=0"):
        environment(0, "environment.params.digits=0")
