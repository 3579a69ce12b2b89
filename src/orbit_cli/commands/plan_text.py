"""A plan as text for people, at most 100 columns wide: the table by part and phase, the bar, the answer."""

from __future__ import annotations

import shlex
import textwrap

from orbit_cli.config.schema.memory import Offload
from orbit_cli.planner.advice import Nearest, largest_micro_batch, longest_response, nearest_fit, sequences_at_once
from orbit_cli.planner.built import not_built
from orbit_cli.planner.notes import notes
from orbit_cli.planner.part import BASE, Part, Side, count, size
from orbit_cli.planner.plan import WORK, Phase, Plan
from orbit_cli.planner.shape import Category
from orbit_cli.planner.study import FROZEN, RECIPES, Row

WIDTH = 100
BAR = 64
NAMES = 44
MINOR = {f"{BASE}{c}" for c in (Category.router, Category.norms, Category.hash_table, Category.hyper)}
MINOR_ROW = f"{BASE}router, norms and the like"
KINDS = {  # what a bar is made of: letter, meaning
    "B": "trainer's base",
    "a": "adapter state",
    "x": "activations",
    "E": "engine's base",
    "k": "KV cache",
    "o": "other",
}


def plan_text(plan: Plan, *, explain: bool = False) -> str:
    """Everything that `orbit plan` prints."""
    lines = [*_heading(plan), "", *_table(plan), "", *_bars(plan), "", *_answer(plan)]
    if explain:
        lines += ["", *_formulas(plan)]
    return "\n".join(line.rstrip() for line in lines)


def plans_text(made: dict[str, Plan], refused: dict[str, str]) -> str:
    """One line per plan, for `-m`."""
    width = max(len(own) for own in (*made, *refused))
    width = max(min(width, 46), 9)
    head = f"{'overrides':<{width}}  {'train':>9} {'rollout':>9} {'usable':>9}  {'fits':<5} nearest that fits"
    lines = [head]
    for own, plan in made.items():
        by_name = {phase.name: size(phase.nbytes) for phase in plan.phases}
        usable = "?" if plan.budget is None else size(plan.budget)
        nearest = None if plan.fits else nearest_fit(plan)
        then = " ".join(shlex.quote(text) for text in nearest.overrides) if nearest else "" if plan.fits else "none"
        start = f"{own:<{width}}  {by_name['train']:>9} {by_name['rollout']:>9} {usable:>9}  {_verdict(plan):<5} "
        lines += textwrap.wrap(start + then, 120, subsequent_indent=" " * len(start), drop_whitespace=False)
    lines += [f"{own:<{width}}  {why}" for own, why in refused.items()]
    if any(_verdict(plan) == "paper" for plan in made.values()):
        lines.append("paper: it fits, and Orbit cannot run it yet; each plan says what is missing")
    return "\n".join(["bytes on each GPU (on a CPU: of the machine)", *(line.rstrip() for line in lines)])


def _verdict(plan: Plan) -> str:
    """paper: it would fit, and something that it needs is not built yet."""
    if not plan.fits:
        return "no"
    if plan.budget is None:
        return "?"
    return "paper" if plan.layout.on_gpu and not_built(plan) else "yes"


def study_text(rows: list[Row]) -> str:
    """The table of `--compare`, and what its formula leaves out."""
    names = [*RECIPES, FROZEN]
    head = f"{'GB':<18} {'parameters':>10}  " + "  ".join(f"{name:>15}" for name in names)
    lines = ["weights and gradients, as the published study counts them: N (weight bits + gradient bits) / 8", "", head]
    for row in rows:
        cells = "  ".join(f"{row.nbytes[name] / 1e9:>15,.0f}" for name in names)
        lines.append(f"{row.name:<18} {count(row.parameters):>10}  {cells}")
    lines += ["", f"{'GB':<18} {'adapter':>10}  {'bit/param':>9}  {'4-bit files':>11}  {'+ adapter, gradients':>20}"]
    for row in rows:
        lines.append(
            f"{row.name:<18} {count(row.adapter_parameters):>10}  {row.adapter_bits:>9.4f}  "
            f"{row.checkpoint_bytes / 1e9:>11,.2f}  {row.real_bytes / 1e9:>20,.1f}"
        )
    note = (
        "The study counts 4.0 bit for everything. Left out there: scales (INT4 with a BF16 scale per 32 is 4.5 bit, "
        "MXFP4 4.25), attention, embeddings and shared experts in BF16 or FP8, and in all recipes optimizer moments, "
        "master weights, activations and caches. The lower table has the files as they are; the adapter is OFT in "
        "blocks of 32 on the published recipe's linears, one rotation for gate and up. `orbit plan model=NAME` counts "
        "all of it."
    )
    return "\n".join([*lines, "", *textwrap.wrap(note, WIDTH)])


def _heading(plan: Plan) -> list[str]:
    config, shape, layout = plan.config, plan.model.shape, plan.layout
    active = f", {count(shape.active_parameters)} active" if shape.experts else ""
    files = size(plan.model.checkpoint_bytes)
    base = (
        f"{files} of files"
        if plan.model.base_bytes == plan.model.checkpoint_bytes
        else (f"{files} published, {size(plan.model.base_bytes)} as {config.quantization.format} base")
    )
    lines = [f"model      {config.model.name}: {count(shape.parameters)} parameters{active}; {base}"]
    memory = "memory unknown" if plan.memory is None else f"{size(plan.memory)}, {size(plan.budget or 0)} usable"
    if layout.on_gpu:
        gpus = max(config.hardware.gpus, 1)
        lines.append(f"hardware   {config.hardware.name}: {gpus} GPU{'s' * (gpus > 1)} of {memory}")
        lines += _layout(plan)
    else:
        lines.append(f"hardware   {config.hardware.name}: this machine's memory, {memory}")
    adapter = config.adapter
    measure = f"block {adapter.block_size}" if adapter.kind == "oft" else f"rank {adapter.rank}"
    experts = " and routed experts" if adapter.expert_targets else ""
    lines.append(
        f"adapter    {adapter.kind} {measure}, {count(plan.adapter_parameters)} parameters on "
        f"{len(adapter.targets)} kinds of linears{experts}"
    )
    n, prompt = plan.lengths, config.rollout.max_prompt_tokens
    lines.append(
        f"lengths    {n.longest:,} tokens a sequence ({prompt:,} prompt + {n.longest - prompt:,} response), "
        f"{n.micro_tokens:,} at once in training,\n           {n.running} sequences at once in sampling"
    )
    return lines


def _layout(plan: Plan) -> list[str]:
    layout, memory = plan.layout, plan.config.memory
    copies = "one copy of the base for both" if memory.shared_base else "two copies of the base"
    if memory.offload is Offload.swap:
        copies += ", of which the one that is not at work waits in host memory"
    where = "on the same GPUs" if layout.colocated else "on GPUs of their own"
    return [
        f"layout     trainer: {_spread(layout.trainer.value, layout.trainer_gpus)}",
        f"           engine:  {_spread(layout.engine.value, layout.engine_gpus)}",
        f"           {where}, {copies}",
    ]


def _spread(layout: str, gpus: int) -> str:
    """Where a base lies, in words, with the config's name for it."""
    if gpus == 1:
        return "whole on one GPU"
    words = {
        "replicated": f"whole on each of {gpus} GPUs",
        "expert_parallel": f"routed experts split over {gpus} GPUs, the rest whole on each",
        "sharded": f"every weight split over {gpus} GPUs, gathered when needed",
        "tensor_parallel": f"every matrix split over {gpus} GPUs",
    }
    return f"{words[layout]} ({layout})"


def _table(plan: Plan) -> list[str]:
    unit, scale = ("GB", 1e9) if plan.peak.nbytes >= 20e9 else ("MB", 1e6)
    where = "each GPU" if plan.layout.on_gpu else "machine"
    phases = plan.phases

    def row(name: str, values: list[float]) -> str:
        cells = "".join(f"{value / scale:>12,.1f}" if value else f"{'-':>12}" for value in values)
        return f"{name:<{NAMES}}{cells}"

    lines = [f"{where + ', ' + unit:<{NAMES}}" + "".join(f"{phase.name:>12}" for phase in phases)]
    for side in Side:
        merged = _merged(plan, side)
        if not merged:
            continue
        lines.append(row(f"{side}", [phase.of(side) for phase in phases]))
        lines += [row(f"  {name}", values) for name, values in merged.items()]
    lines.append(row("sum", [phase.nbytes for phase in phases]))
    if plan.budget is not None:
        lines.append(row("usable", [plan.budget] * len(phases)))
        lines.append(row("left", [plan.budget - phase.nbytes for phase in phases]))
    return lines


def _merged(plan: Plan, side: Side) -> dict[str, list[float]]:
    """Name -> bytes per phase; small categories of the base in one row."""
    rows: dict[str, list[float]] = {}
    for index, phase in enumerate(plan.phases):
        for part in phase.parts:
            if part.side is side:
                name = MINOR_ROW if part.name in MINOR else part.name
                rows.setdefault(name, [0.0] * len(plan.phases))[index] += part.nbytes
    return rows


def _bars(plan: Plan) -> list[str]:
    whole = max([plan.memory or 0, *(phase.nbytes for phase in plan.phases)])
    lines = [_bar(phase, whole, plan) for phase in plan.phases]
    used = {_kind(part) for phase in plan.phases for part in phase.parts}
    legend = [f"{letter} {meaning}" for letter, meaning in KINDS.items() if letter in used]
    legend += ["| usable"] if plan.budget is not None else []
    return [*lines, "  " + "  ".join(legend)]


def _bar(phase: Phase, whole: int, plan: Plan) -> str:
    cells, filled = "", 0.0
    for kind in KINDS:
        filled += sum(part.nbytes for part in phase.parts if _kind(part) == kind)
        cells += kind * (round(filled / whole * BAR) - len(cells))
    cells = f"{cells:.<{BAR}}"
    share = ""
    if plan.budget is not None and plan.memory:
        at = min(round(plan.budget / whole * BAR), BAR - 1)
        cells = cells[:at] + "|" + cells[at + 1 :]
        share = f"{100 * phase.nbytes / plan.budget:.0f}%"
    return f"{phase.name:<8} {cells} {share:>5} {size(phase.nbytes)}"


def _kind(part: Part) -> str:
    if part.name.startswith(BASE):
        return "B" if part.side is Side.trainer else "E"
    if part.side is Side.engine or part.name in ("CUDA context", "libraries"):
        return "k" if part.name == "KV cache" else "o"
    return "a" if part.certain else "x"


def _answer(plan: Plan) -> list[str]:
    if plan.fits and plan.budget is None:
        rows = [("fits", "cannot be told: hardware.memory_mib is not set; set it to what nvidia-smi shows, in MiB")]
    elif plan.fits:
        rows = _fitting(plan)
    else:
        rows = [("fits", "NO"), *(("limit", reason) for reason in plan.limits), *_remedies(plan)]
    rows += [("note", text) for text in notes(plan)]
    return [line for label, text in rows for line in _wrapped(label, text)]


def _fitting(plan: Plan) -> list[tuple[str, str]]:
    left = size((plan.budget or 0) - plan.peak.nbytes)
    where = "on each GPU" if plan.layout.on_gpu else "of this machine"
    rows = [("fits", f"yes, with {left} {where} left in {WORK[plan.peak.name]}")]
    if _verdict(plan) == "paper":
        rows.append(("but", f"Orbit cannot run it yet, it needs: {'; '.join(not_built(plan))}"))
    return [
        *rows,
        ("longest", f"responses of {longest_response(plan):,} tokens (rollout.max_new_tokens) fit, all else equal"),
        (
            "largest",
            f"micro-batches of {largest_micro_batch(plan):,} tokens (trainer.micro_batch_tokens) fit, all else equal",
        ),
        ("cache", f"the memory left would hold {sequences_at_once(plan):,} sequences of full length at once"),
    ]


def _remedies(plan: Plan) -> list[tuple[str, str]]:
    """What to set: the nearest config that fits, and where Orbit cannot run that yet, the nearest that it can."""
    nearest = nearest_fit(plan)
    if nearest is None:
        return [("nearest", "nothing in reach makes it fit: choose a smaller model")]
    rows = _advice("nearest", nearest)
    if not_built(nearest.plan):
        rows.append(("", f"Orbit cannot run that yet, it needs: {'; '.join(not_built(nearest.plan))}"))
        today = nearest_fit(plan, runnable=True)
        rows += _advice("today", today) if today else [("today", "nothing that Orbit can run yet makes it fit")]
    return rows


def _advice(label: str, nearest: Nearest) -> list[tuple[str, str]]:
    """The overrides to paste, and why each."""
    return [
        (label, f"set {' '.join(shlex.quote(text) for text in nearest.overrides)}"),
        ("", "; ".join(change.why for change in nearest.changes)),
    ]


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<11}", subsequent_indent=" " * 11, break_on_hyphens=False)


def _formulas(plan: Plan) -> list[str]:
    lines = ["where each number comes from"]
    seen: set[str] = set()
    for phase in plan.phases:
        for part in phase.parts:
            if part.key not in seen:
                seen.add(part.key)
                lines += _explained(part)
    return lines


def _explained(part: Part) -> list[str]:
    head = f"  {part.key:<36} {size(part.nbytes):>8} = "
    return textwrap.wrap(part.formula, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
