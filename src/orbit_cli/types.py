"""The records that cross rooms. Nothing else crosses between dataset, generator, environment, trainer and engine.

No torch at import: the command line and the config read this file too. A version number is an int >= 0, counted up by
the trainer; `None` means the base without any adapter, which is also the reference policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    """Why a sample ended, as the engine reports it (never guessed from the last token id)."""

    stop = "stop"  # a stop token or stop string; the stop token is part of the sample
    length = "length"  # max_new_tokens reached: the sample is truncated
    abort = "abort"  # the engine gave up on the request


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task instance.

    >>> Prompt(id="chain_sum/train/17", messages=[{"role": "user", "content": "2 + 3 ="}], answer="5",
    ...        environment="chain_sum", metadata={})
    """

    id: str  # unique in its dataset and stable between runs
    messages: list[dict[str, str]]  # chat messages, before the template
    answer: str | None
    environment: str  # name of the environment that scores it
    metadata: dict[str, Any] = field(default_factory=dict)  # whatever the environment needs to score


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the engine samples. Training demands top_p=1 and top_k=-1: a truncated policy is another policy (RL, 1.5)."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One sequence to continue, token-in token-out.

    >>> SampleRequest(token_ids=[1, 9690, 198], params=SamplingParams(max_new_tokens=8), version=3, seed=17)
    """

    token_ids: list[int]
    params: SamplingParams
    version: int | None  # adapter version to sample with; None = base
    seed: int  # the sample is a function of (base, version, token_ids, params, seed) on CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the engine produced for one SampleRequest. The three lists have one entry per new token."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens under softmax(logits / T), full vocabulary, float32
    versions: list[int | None]  # adapter version that sampled each token, as stamped inside the engine
    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens served from the prefix cache


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One sampled response with all that training and evaluation need: the one currency between the parts.

    `token_ids`, `policy_mask`, `logprobs` and `versions` have one entry per token of prompt and response(s);
    `logprobs` and `versions` mean something only where `policy_mask` is true.

    >>> Trajectory(prompt_id="sum/1", group=0, sample=2, token_ids=[5, 6, 7, 2], policy_mask=[False, False, True, True],
    ...            logprobs=[0.0, 0.0, -0.3, -0.01], versions=[None, None, 4, 4], reward=1.0,
    ...            reward_parts={"exact": 1.0}, finish_reason=FinishReason.stop, text="5")
    """

    prompt_id: str
    group: int  # index of its prompt in this step's batch; samples of one prompt share it
    sample: int  # index in the group
    token_ids: list[int]
    policy_mask: list[bool]  # True = sampled by the policy, the end-of-turn token included
    logprobs: list[float]  # the engine's
    versions: list[int | None]
    reward: float | None  # None = it could not be computed: excluded from baseline and loss, and counted
    reward_parts: dict[str, float]
    finish_reason: FinishReason
    text: str  # decoded last response, for people and graders; never re-encoded
    answer: str | None = None  # what the grader extracted, for maj@k; None if nothing
    turns: int = 1
    error: str | None = None  # why reward is None
    correct: bool | None = None  # raw outcome, before any shaping; dynamic sampling and pass@k look at this
    dataset: str = ""  # Prompt.environment: which dataset it belongs to in an evaluation of several
    prompt_text: str = ""  # the last message of the prompt, for people
    reference: str | None = None  # the prompt's answer, for people

    @property
    def response_tokens(self) -> int:
        return sum(self.policy_mask)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is not FinishReason.stop


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """What an adapter is, apart from its numbers.

    >>> AdapterSpec(kind="oft", targets=("q_proj", "v_proj"), expert_targets=(), block_size=32, neumann_terms=6)
    """

    kind: str  # "oft" | "lora"
    targets: tuple[str, ...]  # names of linears: last path component, for example q_proj
    expert_targets: tuple[str, ...] = ()  # of gate_proj, up_proj, down_proj: routed experts
    expert_width: str = "per_expert"  # or "shared": OFT, one rotation of what all experts of a layer get
    block_size: int = 0  # OFT
    neumann_terms: int = 0  # OFT: PEFT's num_cayley_neumann_terms
    rank: int = 0  # LoRA
    scaling: float = 1.0  # LoRA: alpha / r, or alpha / sqrt(r) for rsLoRA; resolved here and nowhere else


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterVersion:
    """One published policy: the tensors that both sides multiply by, as the same BF16 bytes.

    `tensors` maps a name to a CPU bfloat16 tensor; names are the checkpoint's module path plus a suffix:
    OFT `model.layers.3.self_attn.q_proj.oft_R` with finished rotations [blocks, b, b] (y = (x R) W^T);
    LoRA `....lora_A` [r, in] and `....lora_B` [out, r] (scaling stays in the spec).
    Experts: `model.layers.3.mlp.experts.5.gate_proj.oft_R` and so on, one entry per expert; a rotation that a layer's
    experts share is `model.layers.3.mlp.experts.gate_up_proj.oft_R`.
    """

    number: int
    spec: AdapterSpec
    tensors: dict[str, torch.Tensor]
    checksum: str  # sha256 over names, shapes and bytes in sorted name order: orbit_cli.adapters.bundle.checksum

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapReceipt:
    """Proof of delivery of one adapter version, as reported by the engine itself."""

    version: int
    checksum: str  # recomputed inside the engine's process from what it holds
    nbytes: int
    tensors: int
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledBatch:
    """What the rollout side hands to the trainer for one step."""

    trajectories: list[Trajectory]  # whole groups, in group order
    cursor: int  # next unused training prompt
    metrics: dict[str, float]  # of all that was sampled, dropped groups included


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """Figures of one evaluation, flat for the records, and the samples behind them."""

    metrics: dict[str, float]
    trajectories: list[Trajectory]
