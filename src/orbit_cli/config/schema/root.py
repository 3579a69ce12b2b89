"""The root of the config: one typed tree, and the checks that look at two rooms at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from orbit_cli.config.schema import bounds
from orbit_cli.config.schema.base import AdapterConfig, AdapterKind, ComputeDtype, ModelConfig, QuantizationConfig
from orbit_cli.config.schema.learning import (
    AlgorithmConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ExpertPath,
    Overlong,
    RolloutConfig,
    TrainerConfig,
)
from orbit_cli.config.schema.memory import MemoryConfig
from orbit_cli.config.schema.system import Device, EngineConfig, HardwareConfig, LoggingConfig, RunConfig, SyncConfig
from orbit_cli.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class OrbitConfig:
    """Everything a run is."""

    seed: int = 0
    """Seed of data order, sampling and initialisation."""
    run: RunConfig
    """The run folder."""
    model: ModelConfig
    """The base model."""
    quantization: QuantizationConfig
    """The frozen base's number format."""
    adapter: AdapterConfig
    """The small trained part."""
    algorithm: AlgorithmConfig
    """The policy-gradient algorithm."""
    environment: EnvironmentConfig
    """Tasks, prompts and reward."""
    rollout: RolloutConfig
    """Sampling for training."""
    trainer: TrainerConfig
    """The optimisation step."""
    evaluation: EvaluationConfig
    """Held-out evaluation."""
    engine: EngineConfig
    """The SGLang rollout engine."""
    sync: SyncConfig
    """Publishing adapter versions and proving that they arrived."""
    hardware: HardwareConfig
    """The machine."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Where base, adapter and caches lie."""
    logging: LoggingConfig
    """Mirrors and console."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ConfigError(
                f"seed={self.seed} is outside what the random generators take; set it from 0 to 2**32 - 1"
            )
        bounds.at_least(self.engine, "engine", 1, "tensor_parallel")  # here: it may be made of hardware.gpus
        if self.hardware.device is Device.cpu and self.hardware.gpus:
            raise ConfigError(
                f"hardware.gpus={self.hardware.gpus} with hardware.device=cpu: none of them would be used; set "
                "hardware.gpus=0, or a hardware with GPUs, for example hardware=h200x1"
            )
        needs_group = self.algorithm.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
        if needs_group and self.rollout.group_size < 2:
            raise ConfigError(
                f"rollout.group_size={self.rollout.group_size} gives algorithm.advantage={self.algorithm.advantage} "
                "no baseline; set rollout.group_size=2 or more"
            )
        if self.algorithm.overlong is Overlong.penalty and self.overlong_buffer >= self.rollout.max_new_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer={self.overlong_buffer} is not shorter than "
                f"rollout.max_new_tokens={self.rollout.max_new_tokens}: every response would be in the penalty's zone; "
                "set a shorter zone, more tokens, or algorithm.overlong=keep"
            )
        if self.trainer.minibatches > self.rollout.prompts_per_step:
            raise ConfigError(
                f"trainer.minibatches={self.trainer.minibatches} is more than "
                f"rollout.prompts_per_step={self.rollout.prompts_per_step}: a mini-batch would hold no whole group"
            )
        if self.adapter.kind is AdapterKind.lora and self.adapter.use_rslora and self.adapter.alpha <= 0:
            raise ConfigError(f"adapter.alpha={self.adapter.alpha} must be positive")
        path = self.trainer.expert_path
        if self.hardware.device is Device.cpu and path not in (ExpertPath.auto, ExpertPath.reference):
            raise ConfigError(
                f"trainer.expert_path={path} needs a GPU and hardware.device=cpu; set trainer.expert_path=auto"
            )

    @property
    def activations(self) -> ComputeDtype:
        """Of trainer and engine alike: float32 on a CPU, bfloat16 on a GPU, unless model.dtype says otherwise."""
        if self.model.dtype is not ComputeDtype.auto:
            return self.model.dtype
        return ComputeDtype.float32 if self.hardware.device is Device.cpu else ComputeDtype.bfloat16

    @property
    def overlong_buffer(self) -> int:
        """Tokens of the zone before rollout.max_new_tokens in which algorithm.overlong=penalty grows."""
        own = self.algorithm.overlong_buffer
        return max(1, self.rollout.max_new_tokens // 4) if own is None else own

    def check_evaluable(self) -> None:
        """Refuse an evaluation of nothing, which a run may be trained without. Raises ConfigError."""
        if self.evaluation.prompts == 0:
            raise ConfigError("evaluation.prompts=0 leaves nothing to evaluate; set evaluation.prompts, for example 64")

    def check_trainable(self) -> None:
        """Refuse what can be sampled from but not trained on. Raises ConfigError."""
        if self.run.adapter is not None:
            raise ConfigError(
                f"run.adapter={self.run.adapter} is what orbit eval and orbit rollout serve, and training would not "
                "start from it; set adapter.init_from to a PEFT folder, or run.resume to a run to go on with"
            )
        if self.rollout.top_p != 1.0 or self.rollout.top_k != -1:
            raise ConfigError(
                f"rollout.top_p={self.rollout.top_p} and top_k={self.rollout.top_k} sample from a truncated policy "
                "whose log-probs the trainer does not have; set rollout.top_p=1 and rollout.top_k=-1"
            )
        if self.rollout.temperature == 0:
            raise ConfigError("rollout.temperature=0 is greedy: there is no ratio to train on; set it above 0")
