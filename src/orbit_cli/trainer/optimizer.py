"""AdamW on the adapter's float32 master weights, with the learning-rate schedule."""

from __future__ import annotations

import math

import torch

from orbit_cli.config.schema.learning import Schedule, TrainerConfig


def make_optimizer(parameters: list[torch.nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (1711.05101); all state is float32, as the parameters are."""
    wrong = [p.dtype for p in parameters if p.dtype != torch.float32]
    assert not wrong, f"adapter parameters must be float32, found {wrong[0]}"
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Learning rate of step `step` (0-based): linear warm-up, then the schedule; a pure function of the step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    left = max(1, config.steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / left)
    factor = {
        Schedule.constant: 1.0,
        Schedule.linear: 1.0 - done,
        Schedule.cosine: 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.schedule]
    return config.learning_rate * factor
