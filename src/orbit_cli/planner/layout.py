"""Where trainer and engine put the base: how many GPUs each has, and which share of each category one GPU holds."""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.memory import EngineLayout, TrainerLayout
from orbit_cli.config.schema.system import Device
from orbit_cli.errors import ConfigError
from orbit_cli.planner.shape import Category, ModelShape

REPLICATED_SHARE = 1 / 3  # auto keeps a base whole on every trainer GPU up to this share of its memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layouts of one plan, with `auto` decided."""

    trainer: TrainerLayout
    engine: EngineLayout
    trainer_gpus: int
    engine_gpus: int
    colocated: bool
    on_gpu: bool

    def trainer_share(self, category: Category) -> float:
        """Share of a category that one trainer GPU holds."""
        if self.trainer is TrainerLayout.sharded:
            return 1 / self.trainer_gpus
        split = self.trainer is TrainerLayout.expert_parallel and category is Category.experts
        return 1 / self.trainer_gpus if split else 1.0

    def engine_share(self, category: Category) -> float:
        """Share of a category that one engine GPU holds."""
        if self.engine is EngineLayout.tensor_parallel:
            return 1 / self.engine_gpus
        split = self.engine is EngineLayout.expert_parallel and category is Category.experts
        return 1 / self.engine_gpus if split else 1.0


def decide(config: OrbitConfig, shape: ModelShape, base_bytes: int, memory: int | None) -> Layout:
    """The layout of a config, with `auto` resolved. Raises ConfigError for one that the GPUs cannot take."""
    want, on_gpu = config.memory, config.hardware.device is Device.cuda
    gpus = max(config.hardware.gpus, 1) if on_gpu else 1
    engine_gpus = max(config.engine.tensor_parallel, 1) if on_gpu else 1  # ranks on a CPU share one memory
    if on_gpu and engine_gpus > gpus:
        raise ConfigError(
            f"engine.tensor_parallel={engine_gpus} is more than hardware={config.hardware.name} has ({gpus}); set "
            f"engine.tensor_parallel={gpus} or a larger hardware"
        )
    if on_gpu and not want.colocated and engine_gpus >= gpus:
        raise ConfigError(
            f"memory.colocated=false with engine.tensor_parallel={engine_gpus} of {gpus} GPUs leaves none to the "
            f"trainer; set engine.tensor_parallel={max(gpus // 2, 1)} or memory.colocated=true"
        )
    trainer_gpus = gpus if want.colocated or not on_gpu else gpus - engine_gpus
    trainer = _trainer(config, shape, base_bytes, memory, trainer_gpus)
    layout = Layout(
        trainer=trainer,
        engine=_engine(config, trainer, engine_gpus),
        trainer_gpus=trainer_gpus,
        engine_gpus=engine_gpus,
        colocated=want.colocated or not on_gpu,
        on_gpu=on_gpu,
    )
    _check(config, shape, layout)
    return layout


def engine_ranks(config: OrbitConfig, layout: Layout) -> int:
    """Processes over which the engine splits every matrix; on a CPU too, where they share one memory."""
    return config.engine.tensor_parallel if layout.engine is EngineLayout.tensor_parallel or not layout.on_gpu else 1


def _trainer(config: OrbitConfig, shape: ModelShape, base: int, memory: int | None, gpus: int) -> TrainerLayout:
    if config.memory.trainer_layout is not TrainerLayout.auto:
        return config.memory.trainer_layout
    if gpus == 1 or memory is None or base <= memory * REPLICATED_SHARE:
        return TrainerLayout.replicated
    return TrainerLayout.expert_parallel if shape.experts else TrainerLayout.sharded


def _engine(config: OrbitConfig, trainer: TrainerLayout, gpus: int) -> EngineLayout:
    if config.memory.engine_layout is not EngineLayout.auto:
        return config.memory.engine_layout
    if config.memory.shared_base and trainer is not TrainerLayout.sharded:
        return EngineLayout(trainer.value)
    return EngineLayout.replicated if gpus == 1 else EngineLayout.tensor_parallel


def _check(config: OrbitConfig, shape: ModelShape, layout: Layout) -> None:
    ranks = engine_ranks(config, layout)
    if shape.heads % ranks:
        gpus = config.hardware.gpus
        fitting = max(n for n in range(1, min(ranks, shape.heads) + 1) if shape.heads % n == 0)
        every = ranks == gpus  # models of many GPUs have ${hardware.gpus} for it
        raise ConfigError(
            f"{f'hardware.gpus={gpus}: ' * every}engine.tensor_parallel={ranks} does not divide the {shape.heads} "
            f"attention heads of {config.model.name}; set {f'hardware.gpus={fitting} or ' * every}"
            f"engine.tensor_parallel={fitting}"
        )
    for key, used, gpus in (
        ("trainer_layout", layout.trainer, layout.trainer_gpus),
        ("engine_layout", layout.engine, layout.engine_gpus),
    ):
        if used == "expert_parallel" and (not shape.experts or shape.experts % gpus):
            what = f"{shape.experts} experts, which {gpus} GPUs do not divide" if shape.experts else "no routed experts"
            raise ConfigError(
                f"memory.{key}=expert_parallel: {config.model.name} has {what}; set memory.{key}=replicated"
            )
    if not config.memory.shared_base:
        return
    same = layout.trainer.value == layout.engine.value
    if not same or (layout.trainer is TrainerLayout.expert_parallel and layout.trainer_gpus != layout.engine_gpus):
        wanted = "expert_parallel" if shape.experts else "replicated"
        raise ConfigError(
            f"memory.shared_base=true needs one layout, but the trainer is {layout.trainer} on {layout.trainer_gpus} "
            f"GPU(s) and the engine {layout.engine} on {layout.engine_gpus}; set memory.trainer_layout={wanted}, "
            f"memory.engine_layout={wanted} and engine.tensor_parallel={layout.trainer_gpus}"
        )
