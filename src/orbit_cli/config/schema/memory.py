"""Config of where base, adapter and caches lie, and of what the planner counts besides them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orbit_cli.config.schema import bounds
from orbit_cli.errors import ConfigError


class TrainerLayout(StrEnum):
    """How the trainer's base is spread over its GPUs."""

    auto = "auto"
    replicated = "replicated"
    expert_parallel = "expert_parallel"
    sharded = "sharded"


class EngineLayout(StrEnum):
    """How the engine's base is spread over its GPUs."""

    auto = "auto"
    replicated = "replicated"
    expert_parallel = "expert_parallel"
    tensor_parallel = "tensor_parallel"


class Offload(StrEnum):
    """What leaves the GPU while it is not at work."""

    none = "none"
    swap = "swap"


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    """Where base, adapter and caches lie (`orbit plan` shows the bytes), and the overheads that a plan counts."""

    preflight: bool = True
    """train, rollout, eval: plan first and refuse what cannot fit. false goes on at your own risk."""
    trainer_layout: TrainerLayout = TrainerLayout.auto
    """replicated: all on every GPU; expert_parallel: routed experts split by expert, the rest on every GPU; sharded:
    every weight split, gathered when needed; auto: replicated where that takes a third of a GPU, else split (only
    replicated on one GPU can be run yet, the rest is planned)."""
    engine_layout: EngineLayout = EngineLayout.auto
    """replicated, expert_parallel as for the trainer; tensor_parallel: every matrix split over engine.tensor_parallel
    GPUs; auto: tensor_parallel where engine.tensor_parallel is above 1, expert_parallel with memory.shared_base."""
    shared_base: bool = False
    """One copy of the base that trainer and engine both read, instead of one each; both need the same layout (planned
    only, not built yet)."""
    colocated: bool = True
    """Trainer and engine on the same GPUs; false: the engine has engine.tensor_parallel GPUs, the trainer the rest
    (planned only, not built yet)."""
    offload: Offload = Offload.none
    """swap: while one of trainer and engine works, the other's base waits in the machine's memory (planned only,
    not built yet)."""
    routing_replay: bool = False
    """Count the buffers in which the engine's expert choices wait to be replayed by the trainer (planned only, not
    built yet)."""
    headroom: float = 0.02
    """Share of each GPU that a plan leaves free, for fragments of the allocator."""
    context_gib: float = 0.75
    """GPU memory of one process's CUDA context and libraries, in GiB; trainer and engine have one each."""
    graphs_gib: float = 0.8
    """GPU memory of the engine's CUDA graphs and workspaces, in GiB; 0 is counted with engine.cuda_graph_max_bs=0."""
    trainer_host_gib: float = 0.95
    """CPU: resident memory of our own process before it holds a model, in GiB (torch, transformers, our code)."""
    engine_host_gib: float = 1.9
    """CPU: resident memory of the engine's processes before they hold a model, in GiB (SGLang starts several)."""
    host_slack: float = 0.2
    """CPU: what the C allocator takes on top of tensors that come and go, as a share of them; it keeps all of it."""

    def __post_init__(self) -> None:
        bounds.at_least(
            self, "memory", 0, "context_gib", "graphs_gib", "trainer_host_gib", "engine_host_gib", "host_slack"
        )
        if not 0 <= self.headroom < 0.5:
            raise ConfigError(f"memory.headroom={self.headroom} must be a share from 0 to 0.5, for example 0.02")
        if self.shared_base and not self.colocated:
            raise ConfigError(
                "memory.shared_base=true with memory.colocated=false: a base on one set of GPUs cannot be read on "
                "another; set memory.colocated=true or memory.shared_base=false"
            )
        if self.shared_base and self.offload is Offload.swap:
            raise ConfigError(
                "memory.shared_base=true with memory.offload=swap: the one copy is always at work; keep one of the two"
            )
        if self.shared_base and self.engine_layout is EngineLayout.tensor_parallel:
            raise ConfigError(
                "memory.shared_base=true with memory.engine_layout=tensor_parallel: the trainer never splits a matrix, "
                "so it cannot read such parts; set memory.engine_layout=expert_parallel"
            )
