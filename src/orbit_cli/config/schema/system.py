"""Config of where it runs: run folder, engine, adapter sync, hardware, logging."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from orbit_cli.config.schema import bounds
from orbit_cli.errors import ConfigError

MOST_GPUS = 1024  # of one machine
LONGEST_NAME = 200  # bytes; file systems take 255, and numbers and endings are added


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The run folder."""

    root: str = "runs"
    """Folder that holds the run folders."""
    name: str | None = None
    """Name of the run; null makes one from model, adapter, environment and time. The folder is always new."""
    resume: str | None = None
    """Run folder to go on with, or auto: the newest unfinished run below run.root with the same config and, where it is
    set, run.name; a new run if there is none."""
    adapter: str | None = None
    """rollout, eval: adapter to load: a PEFT folder, or a run folder, of which the newest version is taken, exported or
    in a checkpoint. Of a run or one of the folders below its adapters/, model, quantization, environment, evaluation,
    lengths and hardware are those of the run's config.yaml under what the command line sets."""
    output: str | None = None
    """rollout: the JSONL or Parquet file to write; null: inside the run folder. A file that was broken off is gone on
    with, if what made its rows (FILE.jsonl.meta.json says it) is what would make them now."""

    def __post_init__(self) -> None:
        length = len((self.name or "").encode())
        if length > LONGEST_NAME:
            raise ConfigError(
                f"run.name={self.name[:20]}... has {length} bytes, more than a folder's name may have; set one of at "
                f"most {LONGEST_NAME}"
            )


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The SGLang rollout engine, embedded in this process with its scheduler beside it."""

    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; null: on a GPU what base and adapter slots leave of engine.mem_fraction_static of
    its memory, on a CPU 65536."""
    max_running_requests: int = 64
    """Sequences decoded together at most."""
    mem_fraction_static: float = 0.7
    """GPU: share of memory for weights and KV cache."""
    attention_backend: str | None = None
    """SGLang attention backend; null: torch_native on a CPU, triton on a GPU."""
    moe_runner_backend: str = "triton"
    """Must hold the base in the layout the trainer reads: triton."""
    live_versions: int = 2
    """Adapter versions that can be served at the same time, the base not counted."""
    tensor_parallel: int = 1
    """GPUs (or CPU ranks) of the engine."""
    start_timeout_s: float = 600.0
    """Time for the engine to start before it counts as failed."""
    cuda_graph_max_bs: int = 64
    """GPU: largest batch captured as a CUDA graph; 0 switches graphs off."""
    log_level: str = "warning"
    """Level of the engine's own log, which goes to engine.log in the run folder."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further SGLang ServerArgs, passed on as they are; a name SGLang does not know is refused."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "engine", 1, "max_total_tokens", "max_running_requests")
        bounds.at_least(self, "engine", 0, "cuda_graph_max_bs")
        bounds.positive(self, "engine", start_timeout_s=600)
        if not 0 < self.mem_fraction_static < 1:
            raise ConfigError(
                f"engine.mem_fraction_static={self.mem_fraction_static} must lie between 0 and 1; set for example 0.7"
            )
        if self.live_versions < 2:
            raise ConfigError(
                f"engine.live_versions={self.live_versions} leaves no slot for the next version; set at least 2"
            )


class Inject(StrEnum):
    """A fault that sync-test makes on purpose."""

    none = "none"
    withhold = "withhold"
    wrong_version = "wrong_version"
    alter_base = "alter_base"


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    """Publishing an adapter version and proving that it arrived."""

    probe_prompts: int = 4
    """Fixed prompts scored by engine and trainer after every publish."""
    probe_tokens: int = 48
    """First tokens of each probe prompt that are scored; up to twice as many where the prompts begin alike."""
    max_mean_gap: float | None = None
    """Largest allowed mean |log-prob difference| between engine and trainer, on probes and on every training batch;
    null: what rounding explains, with room: 0.01 with float32 activations, 0.2 with bfloat16. With bfloat16 the
    probes' largest eighth is left out: rounding alone moves single log-probs of a prompt by more than 2 nats."""
    movement_share: float = 0.5
    """The engine's log-probs must move by at least this share of what the trainer's moved since the last version, and
    show at least this share of what the adapter moves since the base, at most its inverse."""
    base_checksum_every: int = 1
    """Versions from one checksum over the engine's whole base in memory to the next. 1: after every publish; a base of
    hundreds of gigabytes wants more (the probes after every version would notice a changed base too); 0: at the end."""
    swaps: int = 3
    """sync-test: adapter versions published while requests are in flight."""
    flight_tokens: int = 32
    """sync-test: length of the requests that are in flight during a swap."""
    inject: Inject = Inject.none
    """sync-test: break it on purpose (withhold, wrong_version, alter_base) to see that the test fails."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "sync", 1, "probe_prompts", "swaps", "flight_tokens")
        bounds.at_least(self, "sync", 2, "probe_tokens")
        bounds.at_least(self, "sync", 0, "base_checksum_every")
        bounds.share(self, "sync", "movement_share")
        if self.max_mean_gap is not None and self.max_mean_gap <= 0:
            raise ConfigError(f"sync.max_mean_gap={self.max_mean_gap} would stop every run; leave it at null in doubt")


class Device(StrEnum):
    """Where tensors live."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """The machine."""

    name: str
    """Name for the records."""
    device: Device = Device.cpu
    """cpu or cuda."""
    gpus: int = 0
    """GPUs of the machine. Training uses one so far (`orbit plan` says what more would need), the engine
    engine.tensor_parallel of them."""
    memory_mib: int | None = None
    """Memory of one GPU in MiB, as nvidia-smi shows it (device=cpu: of the machine); null: read from this machine."""
    bandwidth_gb_s: float | None = None
    """Memory bandwidth of one GPU in GB/s (1e9 bytes); null: unknown."""
    link_gb_s: float | None = None
    """Bandwidth of a GPU to the others in GB/s, both directions together (NVLink); null: it is alone, or unknown."""
    host_gb_s: float | None = None
    """Bandwidth of a GPU to the machine's memory in GB/s, one direction (PCIe); null: unknown."""
    host_memory_mib: int | None = None
    """Memory of the machine itself, not of its GPUs, in MiB; held against what memory.offload puts there; null:
    unknown."""
    threads: int | None = None
    """CPU threads of trainer and engine each (they take turns); null: all cores."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "hardware", 1, "memory_mib", "host_memory_mib", "threads")
        bounds.at_least(self, "hardware", 1 if self.device is Device.cuda else 0, "gpus")
        if self.gpus > MOST_GPUS:
            raise ConfigError(f"hardware.gpus={self.gpus} is more than one machine has; set at most {MOST_GPUS}")
        for name in ("bandwidth_gb_s", "link_gb_s", "host_gb_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"hardware.{name}={value} must be positive; leave it at null if it is not known")


class WandbMode(StrEnum):
    """Mirror to Weights & Biases."""

    off = "off"
    offline = "offline"
    online = "online"


class ConsoleMode(StrEnum):
    """Progress on the terminal."""

    auto = "auto"
    rich = "rich"
    plain = "plain"


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """What is written, and where, besides the run folder."""

    wandb: WandbMode = WandbMode.off
    """off, offline or online. Nothing needs W&B, and nothing it does stops a run."""
    project: str = "orbit"
    """W&B project."""
    entity: str | None = None
    """W&B entity."""
    tags: list[str] = field(default_factory=list)
    """W&B tags."""
    console: ConsoleMode = ConsoleMode.auto
    """rich: a live table; plain: one line a step; auto: rich on a terminal."""
    samples_per_step: int = 4
    """Samples written to samples.jsonl each step, to be read by people."""

    def __post_init__(self) -> None:
        bounds.at_least(self, "logging", 0, "samples_per_step")
