"""How many tokens there are: in a micro-batch of the trainer, in a row of it, and in the engine at once. No torch.

A micro-batch is filled by padded tokens (trainer.micro_batch_tokens), but samples of one prompt share its computation,
so fewer are computed. Prompts may be shorter than the limit, which lets more samples in: the largest outcome counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Token counts that the plan multiplies by, all upper bounds for the config."""

    longest: int  # one sequence: prompt and response
    samples: int  # of one training step
    micro_samples: int  # sequences in the largest micro-batch
    micro_tokens: int  # tokens that it computes, shared prompts counted once
    row: int  # longest row of it: tokens that attend to each other
    scored: int  # response tokens in it
    running: int  # sequences that the engine decodes at once
    in_flight: int  # tokens of these at full length


def lengths(config: OrbitConfig, ranks: int = 1) -> Lengths:
    """Token counts of a config; `ranks` trainer ranks share the samples of a step."""
    r, t = config.rollout, config.trainer
    prompt, response, group = r.max_prompt_tokens, r.max_new_tokens * config.environment.max_turns, r.group_size
    samples = r.prompts_per_step * group
    mine = max(1, math.ceil(math.ceil(r.prompts_per_step / t.minibatches) * group / ranks))
    most = max(1, min(mine, t.micro_batch_tokens // (1 + response)))
    outcomes = []
    for fitting in range(1, most + 1, max(1, most // 256)):  # the longest prompts with which so many samples fit
        length = min(prompt, max(1, t.micro_batch_tokens // fitting - response)) if fitting > 1 else prompt
        outcomes.append((math.ceil(fitting / group) * length + fitting * response, fitting, length))
    tokens, fitting, length = max(outcomes)
    running = min(config.engine.max_running_requests, samples)
    return Lengths(
        longest=prompt + response,
        samples=samples,
        micro_samples=fitting,
        micro_tokens=tokens,
        row=length + min(group, fitting) * response,
        scored=fitting * response,
        running=running,
        in_flight=running * (prompt + response),
    )
