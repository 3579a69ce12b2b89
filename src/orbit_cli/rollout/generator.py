"""Prompts to scored trajectories: groups, turns, engine, environment.

A generator knows the engine and the environment; it knows nothing of models, losses or checkpoints. All samples of a
call enter the engine together, which keeps CPU runs reproducible and lets samples of a prompt share their prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from orbit_cli.engine.protocol import RolloutEngine
from orbit_cli.environments.protocol import Environment, Step
from orbit_cli.errors import ConfigError
from orbit_cli.rewards.grade import Grade
from orbit_cli.rollout.chat import Chat
from orbit_cli.rollout.seeds import sample_seed
from orbit_cli.types import FinishReason, Prompt, SampleRequest, SamplingParams, Trajectory


@dataclass(kw_only=True, slots=True)
class _Conversation:
    """One sample under way."""

    prompt: Prompt
    group: int
    sample: int
    messages: list[dict[str, str]]
    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int | None]
    responses: list[str] = field(default_factory=list)
    finish: FinishReason = FinishReason.abort
    step: Step | None = None


class Generator:
    """Samples groups of responses and scores them."""

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        chat: Chat,
        *,
        max_prompt_tokens: int,
        max_turns: int = 1,
        graders: int = 4,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._chat = chat
        self._max_prompt_tokens = max_prompt_tokens
        self._max_turns = max_turns
        self._pool = ThreadPoolExecutor(graders, thread_name_prefix="grade")

    def close(self) -> None:
        """Stop the grading threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def sampling(self, max_new_tokens: int, temperature: float, top_p: float = 1.0, top_k: int = -1) -> SamplingParams:
        """Sampling parameters with this tokenizer's stop tokens."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=self._chat.stop_token_ids,
        )

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        params: SamplingParams,
        version: int | None,
        seed: int,
        place: tuple[int | str, ...],
        first_group: int = 0,
        on_turn: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """`samples` scored trajectories for each prompt, grouped in prompt order.

        The seed of a sample is a function of (seed, place, prompt id, sample index). Raises ConfigError if a prompt is
        longer than max_prompt_tokens: it is refused before anything is sampled, never cut.
        """
        conversations = [
            self._open(prompt, first_group + index, sample)
            for index, prompt in enumerate(prompts)
            for sample in range(samples)
        ]
        active = conversations
        for turn in range(self._max_turns):
            requests = [
                SampleRequest(
                    token_ids=c.tokens,
                    params=params,
                    version=version,
                    seed=sample_seed(seed, *place, c.prompt.id, c.sample, turn),
                )
                for c in active
            ]
            for conversation, completion in zip(active, self._engine.generate(requests), strict=True):
                conversation.tokens = [*conversation.tokens, *completion.token_ids]
                conversation.mask += [True] * len(completion.token_ids)
                conversation.logprobs += completion.logprobs
                conversation.versions += completion.versions
                conversation.finish = completion.finish_reason
                conversation.responses.append(self._chat.text(completion.token_ids))
            for conversation, step in zip(active, self._pool.map(self._score, active), strict=True):
                conversation.step = step
            if on_turn is not None:
                on_turn(len(active))
            active = [c for c in active if self._goes_on(c, last=turn + 1 == self._max_turns)]
            if not active:
                break
        return [self._close(c) for c in conversations]

    def _open(self, prompt: Prompt, group: int, sample: int) -> _Conversation:
        tokens = self._chat.prompt_tokens(prompt.messages)
        if len(tokens) > self._max_prompt_tokens:
            raise ConfigError(
                f"prompt {prompt.id} has {len(tokens)} tokens but rollout.max_prompt_tokens={self._max_prompt_tokens}; "
                "raise it or shorten the prompt"
            )
        return _Conversation(
            prompt=prompt,
            group=group,
            sample=sample,
            messages=list(prompt.messages),
            tokens=tokens,
            mask=[False] * len(tokens),
            logprobs=[0.0] * len(tokens),
            versions=[None] * len(tokens),
        )

    def _score(self, conversation: _Conversation) -> Step:
        return self._environment.step(conversation.prompt, conversation.responses)

    def _goes_on(self, conversation: _Conversation, last: bool) -> bool:
        """Append the environment's reply if the conversation continues."""
        step = conversation.step
        assert step is not None
        if step.done or last or conversation.finish is not FinishReason.stop:
            return False
        glue = self._chat.continuation_tokens(conversation.messages, step.messages)
        conversation.messages += [{"role": "assistant", "content": conversation.responses[-1]}, *step.messages]
        conversation.tokens = [*conversation.tokens, *glue]
        conversation.mask += [False] * len(glue)
        conversation.logprobs += [0.0] * len(glue)
        conversation.versions += [None] * len(glue)
        return True

    def _close(self, c: _Conversation) -> Trajectory:
        grade = c.step.grade if c.step is not None else None
        if grade is None and c.finish is FinishReason.length:
            grade = Grade(reward=0.0, correct=False)  # cut off before its last turn: a task that was not solved
        unfinished = "the conversation ended before the environment gave a reward"
        return Trajectory(
            prompt_id=c.prompt.id,
            group=c.group,
            sample=c.sample,
            token_ids=c.tokens,
            policy_mask=c.mask,
            logprobs=c.logprobs,
            versions=c.versions,
            reward=grade.reward if grade else None,
            reward_parts=dict(grade.parts) if grade else {},
            finish_reason=c.finish,
            text=c.responses[-1],
            answer=grade.answer if grade else None,
            turns=len(c.responses),
            error=grade.error if grade else unfinished,
            correct=grade.correct if grade else None,
            dataset=c.prompt.environment,
            prompt_text=c.prompt.messages[-1]["content"],
            reference=c.prompt.answer,
        )
