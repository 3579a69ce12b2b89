"""README's section on data of one's own, as it stands there: its rows, its commands and its reward function."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from orbit_cli.config.compose import compose
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.environments.protocol import Environment
from orbit_cli.environments.registry import build_environment

SECTION = (Path(__file__).parents[2] / "README.md").read_text().partition("## Your own data\n")[2].partition("\n## ")[0]


def fenced(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    assert found, f"the section has no {language}"
    return found[1]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compose a command's overrides in a folder with the section's files; 98 rows like the two that are shown."""
    rows = [json.loads(line) for line in fenced("jsonl").splitlines()]
    rows += [rows[0] | {"question": f"What is {n} + 5?", "answer": str(n + 5)} for n in range(18, 116)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "closeness.py").write_text(fenced("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    built: list[Environment] = []

    def make(command: str) -> tuple[OrbitConfig, Environment]:
        words = shlex.split(command.replace("\\\n", " "))
        config = compose(words[words.index("train") + 1 :])
        built.append(build_environment(config.environment, config.seed, config.evaluation.prompts))
        return config, built[-1]

    yield make
    for environment in built:
        environment.close()


def test_the_boxed_answer_is_compared(build: Callable[[str], tuple[OrbitConfig, Environment]]) -> None:
    found = re.search(r"`(orbit train environment=math_file [^`]*)`", SECTION)
    assert found
    config, environment = build(found[1])
    assert config.rollout.max_new_tokens == 256 and compose([]).rollout.max_new_tokens == 8
    held_out = {prompt.id for prompt in environment.eval_prompts(64)}
    trained = [environment.train_prompt(index) for index in range(36)]
    assert len({prompt.id for prompt in trained} - held_out) == 36
    first = next(prompt for prompt in trained if "17 + 5" in prompt.messages[-1]["content"])
    assert environment.step(first, ["It is \\boxed{22}."]).grade.reward == 1.0
    assert environment.step(first, ["It is 22."]).grade.reward == 0.0


def test_the_reward_function_grades(build: Callable[[str], tuple[OrbitConfig, Environment]]) -> None:
    config, environment = build(fenced("sh"))
    prompt = environment.train_prompt(0)
    assert prompt.messages[-1]["content"].endswith("? Answer with the number only.")
    rewards = [environment.step(prompt, [text]).grade.reward for text in (prompt.answer, "-1000", "none")]
    assert rewards[0] == 1.0 and 0 < rewards[1] < 0.01 and rewards[2] == 0.0
    assert len(environment.eval_prompts(config.evaluation.prompts)) == 16
