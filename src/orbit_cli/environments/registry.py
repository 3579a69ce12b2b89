"""The registry of environments: from a config to an environment with its grader."""

from __future__ import annotations

from collections.abc import Callable

from orbit_cli.config.schema.learning import EnvironmentConfig, EnvironmentKind, RewardKind
from orbit_cli.environments.file_env import FileEnvironment
from orbit_cli.environments.protocol import Environment, EnvironmentSetup
from orbit_cli.environments.python_env import load_environment
from orbit_cli.environments.reasoning_gym_env import ReasoningGymEnvironment
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.grade import Grader, build_grader
from orbit_cli.rewards.reasoning_gym_task import TaskSpec


def _reasoning_gym(config: EnvironmentConfig, setup: EnvironmentSetup, held_out: int) -> Environment:
    return ReasoningGymEnvironment(setup, TaskSpec(config.task, config.params), config.size)


def _file(config: EnvironmentConfig, setup: EnvironmentSetup, held_out: int) -> Environment:
    return FileEnvironment(
        setup,
        path=config.path,
        eval_path=config.eval_path,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        held_out=held_out,
    )


def _python(config: EnvironmentConfig, setup: EnvironmentSetup, held_out: int) -> Environment:
    return load_environment(setup, config.target, config.params)


ENVIRONMENTS: dict[EnvironmentKind, Callable[[EnvironmentConfig, EnvironmentSetup, int], Environment]] = {
    EnvironmentKind.reasoning_gym: _reasoning_gym,
    EnvironmentKind.file: _file,
    EnvironmentKind.python: _python,
}


def build_environment(config: EnvironmentConfig, seed: int, held_out: int = 64) -> Environment:
    """The environment of a config.

    Args:
        config: the environment group. seed: of the order of training tasks. held_out: evaluation.prompts; kind=file
            without eval_path keeps that many rows away from training.

    Raises:
        ConfigError: a field, file, task, parameter or import path that cannot work.
    """
    if config.max_turns < 1:
        raise ConfigError(f"environment.max_turns={config.max_turns} gives the policy no turn; set at least 1")
    setup = EnvironmentSetup(
        name=config.name,
        seed=seed,
        max_turns=config.max_turns,
        system_prompt=config.system_prompt,
        prompt_template=config.prompt_template,
        grader=_grader(config),
    )
    return ENVIRONMENTS[config.kind](config, setup, held_out)


def _grader(config: EnvironmentConfig) -> Grader | None:
    if config.kind is EnvironmentKind.python and config.reward.kind is RewardKind.task:
        return None  # it scores for itself
    task = TaskSpec(config.task, config.params) if config.kind is EnvironmentKind.reasoning_gym else None
    return build_grader(config.reward, task)
