"""`orbit train`: put a session together, run the loop, leave a run folder that tells all of it."""

from __future__ import annotations

from typing import Any

from orbit_cli.adapters.peft_io import export_peft
from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.errors import ParityError, StorageError, ToldInterrupt
from orbit_cli.models.build import TrainerModel
from orbit_cli.planner.measured import planned_peaks
from orbit_cli.quantization.base_model import base_origin, packed_parts
from orbit_cli.quantization.identity import base_checksum
from orbit_cli.rollout.source import RolloutSource
from orbit_cli.runs.assembly import Serving, check_device, compute_dtype, probes, serving
from orbit_cli.sync.publisher import Publisher
from orbit_cli.telemetry.metrics import read_rows
from orbit_cli.telemetry.receipts import AdaptedRow
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.report import figures, write_report
from orbit_cli.telemetry.run_folder import RunFolder, find_finished, find_resumable
from orbit_cli.trainer.checkpoint import TrainState, list_checkpoints, load_checkpoint
from orbit_cli.trainer.interrupt import StopRequest
from orbit_cli.trainer.layer_meter import LayerMeter
from orbit_cli.trainer.loop import Session, train_loop
from orbit_cli.trainer.optimizer import make_optimizer


def train(config: OrbitConfig) -> dict[str, Any]:
    """Run (or resume) a training. Returns the figures of the report.

    Raises KeyboardInterrupt after a clean stop by Ctrl-C, OrbitError for all that is foreseen; the run folder's status
    says which.
    """
    check_device(config)
    config.check_trainable()
    folder = RunFolder.resume(config) if config.run.resume else RunFolder.create(config)
    recorder = Recorder(folder, config)
    recorder.planned(planned_peaks(config))
    try:
        return _run(config, folder, recorder)
    except StorageError as error:
        if not folder.path.exists():  # nothing was recorded
            raise
        raise StorageError(f"{error} and go on with: orbit train run.resume={folder.path}") from error


def _run(config: OrbitConfig, folder: RunFolder, recorder: Recorder) -> dict[str, Any]:
    with folder.running(), recorder, StopRequest() as stop:
        if config.run.resume and (told := resume_note(config, folder)):
            recorder.notify(told)
        with serving(config, folder.engine_log, recorder.notify, with_trainer=True) as served:
            model = served.model
            session = _session(config, folder, recorder, stop, served, model)
            frozen = model.checksum()
            recorder.held(model.memory())
            recorder.engine(served.engine.gpu_memory)
            recorder.receipts(_adapted_rows(model), _facts(config, served, model, frozen))
            stop.begin()
            train_loop(session)
            session.publisher.check_frozen(session.state.version)
            if model.checksum() != frozen:
                raise ParityError("the trainer's frozen base changed during the run; its adapter cannot be trusted")
            session.export(session.state.version)
        result = figures(folder.path)
        write_report(folder.path)
        if stop.requested:
            steps = f"{session.state.step} of {config.trainer.steps}"
            recorder.notify(f"stopped after step {steps}; go on with: orbit train run.resume={folder.path}")
            raise ToldInterrupt
    return result


def resume_note(config: OrbitConfig, folder: RunFolder) -> str | None:
    """What a person who resumes should know where there is no checkpoint to go on from; None where there is one."""
    if list_checkpoints(folder.checkpoints):
        return None
    steps = max((row["step"] for row in read_rows(folder.metrics) if row["kind"] == "train"), default=0)
    if steps:
        return (
            f"{folder.checkpoints} has no checkpoint to go on from: this starts again at step 1, and the rows of the "
            f"{steps} steps on record are dropped; their adapters are kept in {folder.replaced_adapters}"
        )
    if config.run.resume != "auto":
        return None
    if folder.engine_log.exists():
        return f"going on in {folder.path}, which was stopped before its first step"
    named = f" and run.name={config.run.name}" if config.run.name else ""
    new = f"run.resume=auto: no unfinished run of this config{named} below {config.run.root}; this is a new run"
    other = find_resumable(config, any_name=True)
    if other not in (None, folder):
        return f"{new} (go on with one of another name, {other.path.name}, by run.resume={other.path})"
    finished = find_finished(config)
    if finished is None:
        return new
    return f"{new} (extend the finished one with run.resume={finished.path} trainer.steps={config.trainer.steps})"


def _session(
    config: OrbitConfig,
    folder: RunFolder,
    recorder: Recorder,
    stop: StopRequest,
    served: Serving,
    model: TrainerModel,
) -> Session:
    optimizer = make_optimizer(list(model.bank.parameters()), config.trainer)
    state = TrainState()
    if checkpoints := list_checkpoints(folder.checkpoints):
        state, bank, moments = load_checkpoint(checkpoints[-1])
        model.bank.load_state(bank)
        optimizer.load_state_dict(moments)
        recorder.notify(f"resuming after step {state.step} of {config.trainer.steps}")
    recorder.open(state.step, state.wandb_id)
    packed = packed_parts(served.base)
    origin = base_origin(config.model, config.quantization, served.base)

    def export(version: int) -> None:
        export_peft(model.bank, folder.adapter(version), base_model=str(served.base), packed=packed, origin=origin)

    return Session(
        config=config,
        state=state,
        model=model,
        optimizer=optimizer,
        meter=LayerMeter(model),
        source=RolloutSource(served.engine, served.environment, served.generator, config, recorder.turn),
        publisher=Publisher(probes(config, served), config.sync),
        recorder=recorder,
        export=export,
        stop=stop,
    )


def _facts(config: OrbitConfig, served: Serving, model: TrainerModel, frozen: str) -> list[tuple[str, str]]:
    """What only the loaded parts know."""
    base = sum(value for name, value in model.memory().items() if name.startswith("base"))
    return [
        ("base folder", str(served.base)),
        ("base files", f"sha256 {base_checksum(served.base)[:16]}"),
        ("frozen weights", f"{base / 2**20:.1f} MiB in the trainer, sha256 {frozen[:16]}"),
        ("activations", f"{compute_dtype(config)}".removeprefix("torch.")),
        ("adapter", shipped_text(model)),
        ("reference policy", "the base with the adapter off"),
    ]


def shipped_text(model: TrainerModel) -> str:
    """What is trained, and what of it goes to the engine: OFT's parameters are the skew halves of whole blocks.

    >>> shipped_text(model)
    '2,321,280 float32 parameters, shipped as 4,792,320 bfloat16 numbers (9.14 MiB): whole rotations of 32 x 32'
    """
    trained = sum(site.parameters for site in model.adapted)
    shipped = sum(part.compute.numel() for part in model.bank.parts.values())
    block = model.bank.spec.block_size
    whole = f": whole rotations of {block} x {block}" if model.bank.spec.kind == "oft" else ""
    text = f"{trained:,} float32 parameters, shipped as {shipped:,} bfloat16 numbers"
    return f"{text} ({2 * shipped / 2**20:.2f} MiB){whole}"


def _adapted_rows(model: TrainerModel) -> list[AdaptedRow]:
    """The list of adapted tensors, one row per target."""
    rows: dict[tuple[str, str], AdaptedRow] = {}
    for site in model.adapted:
        target = f"experts.{site.projection}" if site.of_experts else site.projection
        shape = f"{site.out_features} x {site.in_features}"
        before = rows.get((target, shape))
        rows[target, shape] = AdaptedRow(
            name=target,
            modules=max(site.experts, 1) + (before.modules if before else 0),
            shape=shape,
            parameters=site.parameters + (before.parameters if before else 0),
        )
    return list(rows.values())
