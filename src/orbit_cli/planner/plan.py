"""The plan: bytes by part, side and phase on the busiest GPU, whether they fit, and what limits.

`make_plan` is all that commands need. It loads nothing and takes about a millisecond; the pieces are in training.py and
serving.py, the model's facts in families.py, what to change in advice.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import ComputeDtype
from orbit_cli.config.schema.memory import Offload, TrainerLayout
from orbit_cli.config.schema.system import Device
from orbit_cli.engine.arguments import check_engine
from orbit_cli.environments.params import check_environment
from orbit_cli.errors import ConfigError
from orbit_cli.planner.adapters import Site, check_blocks, check_targets, served_sites, sites
from orbit_cli.planner.checkpoint import own_config
from orbit_cli.planner.host import Host, waiting
from orbit_cli.planner.layout import Layout, decide, engine_ranks
from orbit_cli.planner.lengths import Lengths, check_evaluation, lengths
from orbit_cli.planner.machine import host_memory
from orbit_cli.planner.model import Model, read_model
from orbit_cli.planner.part import BASE, GIB, Part, Side, size, sizes_apart
from orbit_cli.planner.serving import Engine
from orbit_cli.planner.training import Trainer
from orbit_cli.planner.words import shown

MIB = 1 << 20
WORK = {"train": "training", "rollout": "sampling"}  # what a phase is called in sentences
CONTEXT = "CUDA context"
CACHED = "kept by the allocator"  # begins the names of what a process holds and does not use
WORKSPACES = 2 * 32 * MIB  # cuBLAS's on Hopper and Blackwell, of the threads that run forward and backward passes


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What lies on the busiest GPU during one phase."""

    name: str  # "train" or "rollout"
    parts: list[Part]
    moment: str = ""  # GPU, training: which moment of the phase is counted, the largest

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def of(self, side: Side) -> int:
        return sum(part.nbytes for part in self.parts if part.side is side)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """What the adapter sits on."""

    trained: list[Site]
    served: list[Site]  # with what the engine fuses with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole answer."""

    config: OrbitConfig
    model: Model
    layout: Layout
    lengths: Lengths
    memory: int | None  # bytes of one GPU (on a CPU: of the machine); None if unknown
    budget: int | None  # of them, what a plan may use
    phases: list[Phase]
    cache_bytes_per_token: float  # on one GPU
    adapted: Adapted
    adapter_parameters: int
    cache_room: tuple[int | None, str] = (None, "")  # tokens that the cache is set to hold, and what sets that
    evaluates: bool = False  # the lengths are those of an evaluation
    host: Host = Host()  # what memory.offload puts into the machine's own memory
    limits: list[str] = field(default_factory=list)  # one sentence each; empty: it fits

    @property
    def fits(self) -> bool:
        return not self.limits

    @property
    def called(self) -> str:
        """The model as the person named it, with the type that its files have."""
        return self.model.shape.called(self.config.model.name)

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.nbytes)

    @property
    def certain_bytes(self) -> int:
        """What no shorter prompt or smaller batch could save: base and adapter."""
        return max(sum(part.nbytes for part in phase.parts if part.certain) for phase in self.phases)


def make_plan(
    config: OrbitConfig,
    *,
    model: Model | None = None,
    like: Plan | None = None,
    trains: bool = True,
    evaluates: bool = False,
) -> Plan:
    """Plan a config; `trains` is false for commands that only sample, of which one `evaluates`. Raises ConfigError or
    CheckpointError.

    `like` is a plan of the same model and base, whose counts are used again where they are the same.
    """
    if like is None:  # what is tried for advice changes nothing of these
        check_engine(config.engine)
        check_environment(config.environment)
    model = like.model if like is not None else model or read_model(config)
    adapted = like.adapted if like is not None and like.config.adapter is config.adapter else None
    if adapted is None:
        if trains:
            _check_targets(config, model)
        adapted = Adapted(trained=sites(model.shape, config.adapter), served=served_sites(model.shape, config.adapter))
    on_gpu = config.hardware.device is Device.cuda
    memory = config.hardware.memory_mib * MIB if config.hardware.memory_mib else None if on_gpu else host_memory()
    layout = decide(config, model.shape, model.base_bytes, memory)
    if trains or not config.run.adapter:  # else the adapter's own blocks count
        check_blocks(adapted.trained, config.adapter, config.model.name, engine_ranks(config, layout))
    spread = trains and layout.trainer is not TrainerLayout.replicated  # whole copies may each take a whole micro-batch
    counted = lengths(config, layout.trainer_gpus if spread else 1, evaluates=evaluates)
    shared = {
        "config": config,
        "model": model,
        "layout": layout,
        "lengths": counted,
        "dtype_bytes": dtype_bytes(config),
    }
    trainer, engine = Trainer(**shared, sites=adapted.trained), Engine(**shared, sites=adapted.served, memory=memory)
    check_evaluation(config, [(model.shape.longest or None, "the model has positions"), engine.cache_room()])
    plan = Plan(
        config=config,
        model=model,
        layout=layout,
        lengths=counted,
        memory=memory,
        budget=round(memory * (1 - config.memory.headroom)) if memory else None,
        phases=_phases(config, layout, trainer, engine, trains),
        cache_bytes_per_token=engine.token_bytes()[0],
        adapted=adapted,
        adapter_parameters=sum(site.trained(config.adapter) for site in adapted.trained),
        cache_room=engine.set_room(),
        evaluates=evaluates,
        host=_host(config, layout, trainer, engine) if trains else Host(),
    )
    plan.limits.extend(_limits(plan, engine))
    return plan


def _check_targets(config: OrbitConfig, model: Model) -> None:
    """Refuse adapter targets that training would refuse. Raises ConfigError, which names the model's own config."""
    try:
        check_targets(model.shape, config.adapter, config.model.name)
    except ConfigError as error:
        better = own_config(config.model)
        if better is None:
            raise
        raise ConfigError(f"{error}; or set {better}, whose config has them") from None


def dtype_bytes(config: OrbitConfig) -> int:
    """Bytes of one activation."""
    return 4 if config.activations is ComputeDtype.float32 else 2


def _phases(config: OrbitConfig, layout: Layout, trainer: Trainer, engine: Engine, trains: bool) -> list[Phase]:
    runtime = _runtime(config, layout)
    served = [*engine.resident(), runtime[Side.engine]]
    if not trains:
        own = [] if layout.on_gpu else [runtime[Side.trainer]]
        return [Phase(name="rollout", parts=[*own, *served, *engine.transient()])]
    trained = [*trainer.resident(), *_workspaces(layout), runtime[Side.trainer]]
    moment, passing = trainer.transient()
    if not layout.colocated:
        return [
            Phase(name="train", parts=[*trained, *passing], moment=moment),
            Phase(name="rollout", parts=[*served, *engine.transient()]),
        ]
    if config.memory.shared_base:
        served = [*engine.resident(with_base=False), runtime[Side.engine]]
    sampling = engine.transient()
    waiting_trainer, waiting_engine = trained, served
    if not layout.on_gpu:
        slack, kept = _host_allocator(config, passing)
        passing, waiting_trainer = [*passing, slack], [*trained, kept]
    elif config.memory.offload is Offload.swap:  # whoever waits keeps nothing on the GPU that it can do without
        waiting_trainer = [part for part in trained if not part.name.startswith(BASE)]
        waiting_engine = [part for part in served if not part.name.startswith((BASE, "KV cache"))]
    else:
        waiting_trainer = [*trained, _cached(passing, Side.trainer, "training")]
        waiting_engine = [*served, _cached(sampling, Side.engine, "sampling")]
    return [
        Phase(name="train", parts=[*trained, *passing, *waiting_engine], moment=moment),
        Phase(name="rollout", parts=[*waiting_trainer, *served, *sampling]),
    ]


def _host(config: OrbitConfig, layout: Layout, trainer: Trainer, engine: Engine) -> Host:
    if config.memory.offload is not Offload.swap or not (layout.on_gpu and layout.colocated):
        return Host()
    mib = config.hardware.host_memory_mib
    parts = waiting(layout, {Side.trainer: trainer.base(), Side.engine: engine.base()})
    return Host(parts=parts, memory=mib * MIB if mib else None)


def _cached(passing: list[Part], side: Side, work: str) -> Part:
    """GPU: torch's allocator keeps what came and went for its own process; the other process cannot have it."""
    return Part(
        name=f"{CACHED} after {work}",
        side=side,
        nbytes=sum(part.nbytes for part in passing),
        formula=f"what comes and goes in {work}: its process's allocator does not give it back",
    )


def _workspaces(layout: Layout) -> list[Part]:
    """What the trainer's matrix products need on a GPU; the engine's is in memory.graphs_gib."""
    formula = "2 threads x 32 MiB of cuBLAS"
    part = Part(name="product workspaces", side=Side.trainer, nbytes=WORKSPACES, formula=formula)
    return [part] if layout.on_gpu else []


def _runtime(config: OrbitConfig, layout: Layout) -> dict[Side, Part]:
    """What each side's process needs before it holds anything of the model."""
    want = config.memory
    if layout.on_gpu:
        return {
            side: Part(
                name=CONTEXT,
                side=side,
                nbytes=round(want.context_gib * GIB),
                formula=f"memory.context_gib={want.context_gib:g} per process",
            )
            for side in Side
        }
    hosts = {Side.trainer: want.trainer_host_gib, Side.engine: want.engine_host_gib}
    return {
        side: Part(
            name="libraries", side=side, nbytes=round(gib * GIB), formula=f"memory.{side}_host_gib={gib:g}, measured"
        )
        for side, gib in hosts.items()
    }


def _host_allocator(config: OrbitConfig, passing: list[Part]) -> tuple[Part, Part]:
    """CPU: what the C allocator takes on top while training, and what it keeps of all that afterwards."""
    nbytes, share = sum(part.nbytes for part in passing), config.memory.host_slack
    slack = Part(
        name="allocator",
        side=Side.trainer,
        nbytes=round(nbytes * share),
        formula=f"memory.host_slack={share:g} of what comes and goes, measured",
    )
    kept = Part(
        name=f"{CACHED} after training",
        side=Side.trainer,
        nbytes=round(nbytes * (1 + share)),
        formula=f"what comes and goes in training x (1 + memory.host_slack={share:g})",
    )
    return slack, kept


def _culprit(phase: Phase) -> str:
    """What takes most: the two copies of the base where these are half of it, else the largest part."""
    bases = {side: sum(p.nbytes for p in phase.parts if p.side is side and p.name.startswith(BASE)) for side in Side}
    if all(bases.values()) and sum(bases.values()) > phase.nbytes / 2:
        both = size(sum(bases.values()))
        return (
            f"the two copies of the base alone take {both}: {size(bases[Side.trainer])} for the trainer, "
            f"{size(bases[Side.engine])} for the engine"
        )
    largest = max(phase.parts, key=lambda part: part.nbytes)
    return f"the largest part is the {largest.side}'s {shown(largest.name)}, {size(largest.nbytes)}"


def _limits(plan: Plan, engine: Engine) -> list[str]:
    """Everything that stands in the way, one sentence each, the first the most important."""
    found: list[str] = []
    where, said = "each GPU" if plan.layout.on_gpu else "this machine", ""
    for nbytes in sorted({phase.nbytes for phase in plan.phases}, reverse=True):
        if plan.budget is not None and nbytes > plan.budget:
            phases = [phase for phase in plan.phases if phase.nbytes == nbytes]
            who, why = " and ".join(WORK[phase.name] for phase in phases), _culprit(phases[0])
            needs, has = sizes_apart(nbytes, plan.budget)
            found.append(
                f"{who} need{'s' * (len(phases) == 1)} {needs} on {where}, which has {has} to use "
                f"({size(nbytes - plan.budget)} too little)" + (f"; {why}" if why != said else "")
            )
            said = why
    if plan.host.limit:
        found.append(plan.host.limit)
    config, counted = plan.config, plan.lengths
    added = counted.response_key.removeprefix("rollout.")
    room, has_room = plan.cache_room
    if room is not None and room < counted.longest:
        found.append(
            f"the cache holds no whole sequence of {counted.longest:,} tokens (rollout.max_prompt_tokens + "
            f"{added}): {has_room} for {room:,}"
        )
    if plan.layout.on_gpu and plan.memory:
        static = sum(
            part.nbytes
            for part in engine.resident()
            if part.name != "CUDA graphs"  # captured later, beside the reserved share
        )
        share = plan.memory * config.engine.mem_fraction_static
        if static > share * 1.001:
            takes, may = sizes_apart(static, share)
            room = plan.budget is not None and plan.peak.nbytes <= plan.budget
            found.append(
                f"the engine's base, slots and cache take {takes}, more than "
                f"engine.mem_fraction_static={config.engine.mem_fraction_static:g} of a GPU ({may})"
                + "; that share binds: the GPU itself has memory left, which a larger one would let the engine use"
                * room
            )
    if plan.model.shape.longest and counted.longest > plan.model.shape.longest:
        found.append(
            f"sequences of {counted.longest:,} tokens (rollout.max_prompt_tokens + {added}) are longer than the "
            f"model's {plan.model.shape.longest:,} positions"
        )
    return found
