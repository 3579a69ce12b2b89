"""Where the parts are put together: the one room that knows every other.

Each command calls one function of this room (or of the one room that does its work); no other room imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from orbit_cli.adapters.peft_io import load_peft
from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.config.schema.system import Device
from orbit_cli.engine.sglang_engine import SGLangEngine
from orbit_cli.environments.protocol import Environment
from orbit_cli.environments.registry import build_environment
from orbit_cli.models.build import TrainerModel, build_model
from orbit_cli.models.check import check_checkpoint, check_known
from orbit_cli.planner.preflight import require_gpus
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.quantization.folder import check_tokenizer
from orbit_cli.rollout.chat import Chat
from orbit_cli.rollout.generator import Generator
from orbit_cli.runs.adapters import ServedAdapter
from orbit_cli.sync.parity import Probes, tolerance
from orbit_cli.trainer.heap import grow_blocks
from orbit_cli.types import AdapterSpec


@dataclass(kw_only=True, slots=True)
class Serving:
    """A running engine with all that is needed to sample and score with it."""

    base: Path
    spec: AdapterSpec
    engine: SGLangEngine
    environment: Environment
    chat: Chat
    generator: Generator
    model: TrainerModel | None = None  # the trainer's side, where the command has one


def compute_dtype(config: OrbitConfig) -> torch.dtype:
    """Of the activations of trainer and engine."""
    return getattr(torch, str(config.activations))


def set_threads(config: OrbitConfig) -> None:
    """CPU threads of this process (the engine takes the same number; the two take turns)."""
    torch.set_num_threads(config.hardware.threads or os.cpu_count() or 1)


def check_device(config: OrbitConfig) -> None:
    """Refuse GPUs that the driver does not show. Raises ConfigError."""
    if config.hardware.device is Device.cuda:
        require_gpus(config, torch.cuda.device_count())


@contextmanager
def serving(
    config: OrbitConfig,
    engine_log: Path,
    notify: Callable[[str], None],
    *,
    adapter: ServedAdapter | None = None,
    served_base: Path | None = None,
    with_trainer: bool = False,
    environment: Environment | None = None,
) -> Iterator[Serving]:
    """Prepare the base, start the engine on it, and stop the engine at the end, whatever happens.

    The trainer's model, if asked for, is built while the engine loads; on a GPU after it, since the engine sizes its
    cache by what is free before and after its own base.
    The engine gets room for `adapter` as it was read from disk, else for the adapter that the config describes.
    `environment` is that of the config where the caller has built it; then the caller closes it too.
    `served_base` gives the engine another base folder than the trainer's; only sync-test does that, to see it fail.
    """
    set_threads(config)
    own = None if environment else build_environment(config.environment, config.seed, config.evaluation.prompts)
    environment = environment or own
    check = check_checkpoint if with_trainer else check_known  # the engine alone serves more families
    base = prepare_base(config.model, config.quantization, notify, check)
    if adapter:
        adapter.check(base)
    tokenizer = Path(config.model.tokenizer) if config.model.tokenizer else base
    check_tokenizer(tokenizer, "model.tokenizer" if config.model.tokenizer else "model.path")
    chat = Chat(tokenizer, config.model.stop_token_ids)
    spec = adapter.version.spec if adapter else spec_from_config(config.adapter)
    engine = SGLangEngine(
        served_base or base,
        spec,
        engine=config.engine,
        hardware=config.hardware,
        model_dtype=str(compute_dtype(config)).removeprefix("torch."),
        seed=config.seed,
        log_path=engine_log,
    )
    notify("starting the SGLang engine")
    generator = Generator(
        engine,
        environment,
        chat,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_turns=config.environment.max_turns,
    )
    try:
        engine.launch()
        meanwhile = config.hardware.device is Device.cpu
        model = trainer_model(config, base, spec) if with_trainer and meanwhile else None
        engine.start()
        if with_trainer and not meanwhile:
            model = trainer_model(config, base, spec)
        yield Serving(
            base=base,
            spec=spec,
            engine=engine,
            environment=environment,
            chat=chat,
            generator=generator,
            model=model,
        )
    finally:
        generator.close()
        if own is not None:
            own.close()
        engine.shutdown()


def trainer_model(config: OrbitConfig, base: Path, spec: AdapterSpec) -> TrainerModel:
    """The trainer's model on the same base, with its adapter (from `adapter.init_from` if that is set)."""
    grow_blocks(torch.device(str(config.hardware.device)))
    model = build_model(
        base,
        spec,
        layers=config.adapter.layers,
        device=str(config.hardware.device),
        dtype=compute_dtype(config),
        seed=config.seed,
    )
    model.choose_experts(str(config.trainer.expert_path), config.trainer.expert_chunk_bytes)
    if config.trainer.activation_checkpointing:
        model.enable_checkpointing()
    if config.adapter.init_from:
        load_peft(model.bank, Path(config.adapter.init_from))
    return model


def probes(config: OrbitConfig, serving: Serving) -> Probes:
    """What proves that engine and trainer compute the same; both are there."""
    return Probes(serving.engine, serving.model, probe_tokens(config, serving), tolerance(config))


def probe_tokens(config: OrbitConfig, serving: Serving) -> list[list[int]]:
    """The fixed probe prompts: the first training prompts, their first `sync.probe_tokens` tokens.

    The first ones, because a text without its beginning is nothing that the model was trained on: see docs/log.md.
    More of them, up to twice as many, where the prompts begin alike, or all probes might be the same text.
    """
    prompts = [serving.environment.train_prompt(index) for index in range(config.sync.probe_prompts)]
    rows, wanted = [serving.chat.prompt_tokens(p.messages) for p in prompts], config.sync.probe_tokens
    alike = len(os.path.commonprefix(rows))
    return [row[: max(wanted, min(alike + wanted // 2, 2 * wanted))] for row in rows]
