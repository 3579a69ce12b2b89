"""How many tokens there are: in a micro-batch of the trainer, in a row of it, and in the engine at once. No torch.

A micro-batch is filled by padded tokens (trainer.micro_batch_tokens), but samples of one prompt share its computation,
so fewer are computed. Prompts and responses may be shorter than their limits, which lets more samples in: the outcome
with the most tokens counts, so that a plan holds for every length up to the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Token counts that the plan multiplies by, all upper bounds for the config."""

    response: int  # what one turn may sample
    response_key: str  # the config key that says so
    longest: int  # one sequence: prompt and response, all turns of it
    samples: int  # of one training step, or of an evaluation
    share: int  # of them, what one GPU takes for one optimiser step
    micro_samples: int  # sequences in the largest micro-batch
    micro_prompts: int  # prompts that they share
    micro_prompt: int  # tokens of one of these
    micro_response: int  # tokens of one sample's response
    row: int  # longest row of it: tokens that attend to each other
    scored: int  # response tokens in it
    running: int  # sequences that the engine decodes at once
    in_flight: int  # tokens of these at full length

    @property
    def micro_tokens(self) -> int:
        """Tokens that the largest micro-batch computes, shared prompts counted once."""
        return self.micro_prompts * self.micro_prompt + self.scored

    @property
    def padded_tokens(self) -> int:
        """The same micro-batch as trainer.micro_batch_tokens counts it: every sample with a prompt of its own."""
        return self.micro_samples * (self.micro_prompt + self.micro_response)


def check_evaluation(config: OrbitConfig, rooms: list[tuple[int | None, str]]) -> None:
    """Responses of an evaluation have a length of their own. Raises ConfigError if no sequence can be that long.

    `rooms` are (tokens that there is room for, None if that is not known; what has the room).
    """
    wanted, longest = config.evaluation.max_new_tokens, evaluated(config)
    for most, what in rooms:
        if longest and most is not None and longest > most:
            raise ConfigError(
                f"evaluation.max_new_tokens={wanted} with prompts of up to {config.rollout.max_prompt_tokens:,} makes "
                f"sequences of {longest:,} tokens, and {what} for {most:,}; set evaluation.max_new_tokens=null (as in "
                "training) or less"
            )


def evaluated(config: OrbitConfig) -> int:
    """Tokens of the longest sequence of an evaluation that has a length of its own; 0 if it has none."""
    wanted = config.evaluation.max_new_tokens if config.evaluation.prompts else None
    return config.rollout.max_prompt_tokens + wanted * config.environment.max_turns if wanted else 0


def held_at_once(config: OrbitConfig, running: int, response: int) -> int:
    """Tokens that a cache must hold for so many sequences with `response` tokens each and, at another time, for one
    sequence of an evaluation."""
    return max(running * (config.rollout.max_prompt_tokens + response), evaluated(config))


def lengths(config: OrbitConfig, ranks: int = 1, *, evaluates: bool = False) -> Lengths:
    """Token counts of a config; `ranks` trainer ranks share the samples of a step. With `evaluates` those of an
    evaluation, which has samples, and may have a length, of its own."""
    r, t, own = config.rollout, config.trainer, config.evaluation
    prompt, group, turn, key = r.max_prompt_tokens, r.group_size, r.max_new_tokens, "rollout.max_new_tokens"
    samples = r.prompts_per_step * group
    if evaluates:
        samples = max(own.prompts * own.samples, 1)
        if own.max_new_tokens:
            turn, key = own.max_new_tokens, "evaluation.max_new_tokens"
    response = turn * config.environment.max_turns
    mine = max(1, math.ceil(math.ceil(r.prompts_per_step / t.minibatches) * group / ranks))
    most = max(1, min(mine, t.micro_batch_tokens // 2))
    outcomes = [(prompt + response, 1, prompt, response)]  # one goes in, however long
    for fitting in {*range(2, most, max(1, most // 256)), most} - {
        1
    }:  # the longest responses, then prompts, for so many
        whole = t.micro_batch_tokens // fitting
        answer = min(response, whole - 1)
        length = min(prompt, whole - answer)
        outcomes.append((math.ceil(fitting / group) * length + fitting * answer, fitting, length, answer))
    _, fitting, length, answer = max(outcomes)
    running = min(config.engine.max_running_requests, samples)
    return Lengths(
        response=turn,
        response_key=key,
        longest=prompt + response,
        samples=samples,
        share=mine,
        micro_samples=fitting,
        micro_prompts=math.ceil(fitting / group),
        micro_prompt=length,
        micro_response=answer,
        row=length + min(group, fitting) * answer,
        scored=fitting * answer,
        running=running,
        in_flight=running * (prompt + response),
    )


def response_tokens(config: OrbitConfig) -> int:
    """Tokens that all turns of one sequence may sample."""
    return config.rollout.max_new_tokens * config.environment.max_turns


def one_sequence(prompt: int, response: int) -> int:
    """The largest trainer.micro_batch_tokens, up to a whole sequence, that never puts two into a micro-batch.

    >>> one_sequence(128, 8), one_sequence(128, 4096)
    (17, 4224)
    """
    return min(prompt + response, 2 * response + 1)


def micro_batch(config: OrbitConfig, counted: Lengths) -> str:
    """Of what the largest micro-batch consists, and why it is no larger."""
    samples, budget = counted.micro_samples, config.trainer.micro_batch_tokens
    if samples == 1:
        of = "one sequence"
    else:
        prompts = f"{counted.micro_prompts:,} prompts" if counted.micro_prompts > 1 else "one prompt"
        group = "" if config.rollout.group_size == 1 else "that share "
        of = f"{samples:,} samples {group or 'of '}{prompts} of {_tokens(counted.micro_prompt)}"
    if counted.micro_response < response_tokens(config):
        of += f" with responses of {counted.micro_response:,}"
    elif samples == counted.share and counted.micro_prompt == config.rollout.max_prompt_tokens:
        return f"{of}, all of a step that one trainer process gets"
    if counted.longest > budget and samples == 1:
        return f"{of}, alone since it is longer than trainer.micro_batch_tokens={budget:,}"
    return f"{of}, what trainer.micro_batch_tokens={budget:,} lets in"


def _tokens(number: int) -> str:
    return f"{number:,} token{'s' * (number != 1)}"


def adds_up(config: OrbitConfig, counted: Lengths) -> str:
    """How the tokens of the largest micro-batch are counted."""
    n, response = counted, response_tokens(config)
    formula = f"{n.micro_prompts:,} x {n.micro_prompt:,} prompt + {n.micro_samples:,} x {n.micro_response:,} response"
    if n.micro_samples == 1:
        return f"{formula}: one sequence"
    rules = [f"a micro-batch takes samples up to trainer.micro_batch_tokens={config.trainer.micro_batch_tokens:,}"]
    rules[0] += " tokens, each counted as long as the longest of them"
    if config.rollout.group_size > 1:
        rules.append(f"the up to {config.rollout.group_size} samples of a prompt compute it once")
    limits = [("prompts", n.micro_prompt, config.rollout.max_prompt_tokens), ("responses", n.micro_response, response)]
    for what, counted_as, limit in limits:
        if counted_as < limit:
            rules.append(
                f"{what} may be shorter than {limit:,}, and more samples fit then: what has most tokens is counted"
            )
    return f"{formula}; {'; '.join(rules)}"
