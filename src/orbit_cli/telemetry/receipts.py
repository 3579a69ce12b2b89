"""What a run says of itself before its first step: the essentials of the config, the adapted tensors, the batch
arithmetic and the loss divisor. Plain data: the console prints it and the report shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.telemetry.files import intact, read_json, write_json

_DIVISORS = {
    "token_mean": "policy tokens of the optimiser step",
    "seq_mean_token_mean": "samples of the optimiser step x each sample's policy tokens",
    "seq_mean_token_sum": "samples of the optimiser step",
    "constant": "samples of the optimiser step x {constant}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedRow:
    """One line of the list of adapted tensors.

    >>> AdaptedRow(name="q_proj", modules=30, shape="576 x 576", parameters=268_000)
    """

    name: str  # target, for example q_proj or experts.gate_proj
    modules: int  # linears of that name and shape that are adapted
    shape: str  # out x in of one of them
    parameters: int  # trained parameters over all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipts:
    """Title -> lines of (label, text), and the list of adapted tensors."""

    blocks: dict[str, list[tuple[str, str]]]
    adapted: list[AdaptedRow] = field(default_factory=list)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Receipts | None:
        """None if the run died before it wrote them."""
        found = read_json(path)
        if found is None:
            return None
        with intact(path):
            blocks = {title: [(label, text) for label, text in lines] for title, lines in found["blocks"].items()}
            return cls(blocks=blocks, adapted=[AdaptedRow(**row) for row in found["adapted"]])

    def lines(self) -> list[str]:
        """As text, for the console."""
        shown: list[str] = []
        for title, pairs in self.blocks.items():
            shown += [title, *(f"  {label:<17} {text}" for label, text in pairs)]
        if self.adapted:
            shown.append(f"adapted tensors ({sum(row.parameters for row in self.adapted):,} parameters)")
        shown += [
            f"  {row.name:<20} {row.modules:>6} x {f'[{row.shape}]':<15} {row.parameters:>13,}" for row in self.adapted
        ]
        return shown


def receipts(
    config: OrbitConfig, *, run: Path, adapted: Sequence[AdaptedRow], facts: Sequence[tuple[str, str]]
) -> Receipts:
    """Receipts of a run. `facts` are lines that only the loaded parts know, such as the base's checksum."""
    a, r, t = config.algorithm, config.rollout, config.trainer
    samples = r.prompts_per_step * r.group_size
    constant = a.aggregation_constant or r.max_new_tokens
    size = f"block {config.adapter.block_size}" if config.adapter.kind == "oft" else f"rank {config.adapter.rank}"
    correction = a.correction.value if a.correction == "none" else f"{a.correction} up to {a.correction_high:g}"
    shared = config.adapter.expert_width == "shared"
    experts = ["gate_up_proj (one for all of a layer)"] if shared else config.adapter.expert_targets
    targets = [*config.adapter.targets, *(f"experts.{name}" for name in experts)]
    most = f" per round, up to {a.dynamic_sampling_rounds} rounds (dynamic sampling)"
    rounds = most if a.dynamic_sampling and a.dynamic_sampling_rounds > 1 else ""
    blocks = {
        "run": [
            ("model", f"{config.model.name}, base frozen in {config.quantization.format}"),
            ("adapter", f"{config.adapter.kind}, {size}, on {', '.join(targets)}"),
            ("algorithm", f"{a.name}: advantage {a.advantage}, loss {a.loss}, correction {correction}, KL {a.kl}"),
            ("environment", f"{config.environment.name}, reward {config.environment.reward.kind}"),
            ("hardware", f"{config.hardware.name} ({config.hardware.device})"),
            ("seed", str(config.seed)),
            ("folder", str(run)),
        ],
        "batch": [
            ("samples per step", f"{r.prompts_per_step} prompts x {r.group_size} samples = {samples}"),
            ("tokens per step", f"at most {samples} x {r.max_new_tokens} = {samples * r.max_new_tokens} new{rounds}"),
            ("optimiser steps", f"{t.minibatches} x {t.epochs} per step, {t.steps} steps, {t.learning_rate:g} peak"),
            ("micro-batches", f"up to {t.micro_batch_tokens} tokens; the result does not depend on it"),
            ("loss divisor", f"{a.aggregation}: {_DIVISORS[a.aggregation].format(constant=constant)}"),
        ],
    }
    if facts:
        blocks["loaded"] = list(facts)
    return Receipts(blocks=blocks, adapted=list(adapted))
