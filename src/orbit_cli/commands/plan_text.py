"""A plan as text for people, 60 to 100 columns wide: the table by part and phase, the bar, the answer."""

from __future__ import annotations

import shlex
import textwrap

from orbit_cli.commands.width import columns, wrapped
from orbit_cli.config.schema.memory import Offload
from orbit_cli.planner.adapters import sites
from orbit_cli.planner.advice import Nearest, nearest_fit
from orbit_cli.planner.built import Verdict, listed, not_built, verdict, without_model
from orbit_cli.planner.largest import longest_words, micro_batch_words, sequences_at_once
from orbit_cli.planner.lengths import evaluated, micro_batch
from orbit_cli.planner.notes import notes
from orbit_cli.planner.part import BASE, GIB, Part, Side, count, size
from orbit_cli.planner.plan import Phase, Plan
from orbit_cli.planner.preflight import VERBS
from orbit_cli.planner.today import runs_today
from orbit_cli.planner.words import shown

CELL = 12  # columns of a figure in the table, with its space; fewer where the line is short
NAMES = 44  # columns of the names before them, at most
BAR = 64  # cells of a bar, at most
BESIDE_BAR = 25  # columns around it: phase, share, bytes
HARD = "\x00"  # a space that no line ends at
NOTES = 3  # most of them; --json has all
SMALL = 0.01  # parts below this share of the largest phase are one row
SMALL_ROW = "smaller parts (--explain names them)"
KINDS = {  # what a bar is made of: letter, meaning
    "B": "trainer's base",
    "a": "adapter",
    "x": "training",
    "E": "engine's base",
    "k": "KV cache",
    "o": "other",
}


def plan_text(plan: Plan, *, command: str = "train") -> str:
    """Everything that `orbit plan` prints; `command` is the one that is planned."""
    lines = [*heading(plan, command), "", *_table(plan), "", *_bars(plan), "", *_answer(plan, command)]
    return "\n".join(line.rstrip() for line in lines)


def heading(plan: Plan, command: str = "train", rows: int | None = None) -> list[str]:
    """What is planned: model, machine, layout, adapter, lengths; the first `rows` of it."""
    return _lines(_heading(plan, command)[:rows])


def _heading(plan: Plan, command: str) -> list[tuple[str, str]]:
    config, shape, layout = plan.config, plan.model.shape, plan.layout
    active = f", {count(shape.active_parameters)} active" if shape.experts else ""
    files = size(plan.model.checkpoint_bytes)
    base = (
        f"{files} of files"
        if plan.model.base_bytes == plan.model.checkpoint_bytes
        else (f"{files} published, {size(plan.model.base_bytes)} as {config.quantization.format} base")
    )
    rows = [("model", f"{config.model.name}: {count(shape.parameters)} parameters{active}; {base}")]
    if layout.on_gpu:
        gpus = max(config.hardware.gpus, 1)
        rows.append(("hardware", f"{config.hardware.name}: {gpus} GPU{'s' * (gpus > 1)} of {_memory(plan)}"))
        rows += _layout(plan, command)
    else:
        rows.append(("hardware", f"{config.hardware.name}: this machine's memory, {_memory(plan)}"))
    adapter = config.adapter
    measure = f"block {adapter.block_size}" if adapter.kind == "oft" else f"rank {adapter.rank}"
    adapted = sites(shape, adapter)
    experts = sorted({site.name for site in adapted if site.experts or site.shared})
    linears = sorted({site.name for site in adapted if not (site.experts or site.shared)})
    on = [", ".join(linears)] * bool(linears) + [f"{', '.join(experts)} of routed experts"] * bool(experts)
    rows.append(
        ("adapter", f"{adapter.kind} {measure}, {count(plan.adapter_parameters)} parameters on {' and '.join(on)}")
    )
    n, prompt = plan.lengths, config.rollout.max_prompt_tokens
    padded = f" ({n.padded_tokens:,} padded)" if n.padded_tokens != n.micro_tokens else ""
    training = (
        f"; a micro-batch of training computes up to {n.micro_tokens:,} tokens{padded}: {micro_batch(config, n)}"
        if command == "train"
        else ""
    )
    rows.append(
        (
            "lengths",
            f"{prompt:,} prompt + {n.longest - prompt:,} response tokens a sequence, {n.running:,} sequences at once "
            f"in sampling{training}{_evaluation(plan)}",
        )
    )
    return rows


def _evaluation(plan: Plan) -> str:
    """That an evaluation has a length of its own, for which only the cache and the positions are asked."""
    wanted = plan.config.evaluation.max_new_tokens
    apart = evaluated(plan.config) and not plan.evaluates
    return f"; {wanted:,} response tokens in an evaluation" if apart else ""


def _memory(plan: Plan) -> str:
    """A GPU's memory in both units, and what of it is used."""
    if plan.memory is None or plan.budget is None:
        return "memory unknown"
    kept = f"{plan.config.memory.headroom:.0%} stays free, memory.headroom"
    return f"{size(plan.memory)} ({plan.memory / GIB:.1f} GiB), {size(plan.budget)} usable ({kept})"


def _layout(plan: Plan, command: str) -> list[tuple[str, str]]:
    layout, memory = plan.layout, plan.config.memory
    engine = f"engine:  {_spread(layout.engine.value, layout.engine_gpus)}"
    idle = plan.config.hardware.gpus - layout.engine_gpus
    if command != "train":
        unused = f"; {idle} GPU{'s stay' if idle > 1 else ' stays'} idle" if idle > 0 else ""
        return [("layout", f"{engine}{unused} (engine.tensor_parallel={plan.config.engine.tensor_parallel})")]
    copies = "one copy of the base for both" if memory.shared_base else "two copies of the base"
    if memory.offload is Offload.swap:
        copies += ", of which the one that is not at work waits in host memory"
    where = "on the same GPUs" if layout.colocated else "on GPUs of their own"
    return [
        ("layout", f"trainer: {_spread(layout.trainer.value, layout.trainer_gpus)}"),
        ("", engine),
        ("", f"{where}, {copies}"),
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
    powers = {"MB": 6, "GB": 9, "TB": 12, "PB": 15, "EB": 18}
    unit = next((name for name, power in powers.items() if plan.peak.nbytes < 20 * 10 ** (power + 3)), "EB")
    scale = 10 ** powers[unit]
    place = "on each GPU" if plan.layout.on_gpu else "of this machine"
    where = f"{unit} (10^{powers[unit]} bytes) {place}"
    phases = plan.phases
    sums = [nbytes for phase in phases for nbytes in (phase.nbytes, (plan.budget or 0) - phase.nbytes)]
    longest = max(len(_number(nbytes / scale)) for nbytes in [*sums, plan.budget or 0])
    cell = max(CELL if columns() >= 80 else 0, longest + 2, *(len(phase.name) + 2 for phase in phases))
    room = min(columns() - cell * len(phases), NAMES)

    def row(name: str, values: list[float]) -> str:
        cells = "".join(f"{_number(value / scale) if value else '-':>{cell}}" for value in values)
        indent = " " * (len(name) - len(name.lstrip()))
        *above, last = textwrap.wrap(name.strip(), room, initial_indent=indent, subsequent_indent=f"{indent}  ")
        return "\n".join([*above, f"{last:<{room}}{cells}"])

    lines = [f"{where:<{room}}" + "".join(f"{phase.name:>{cell}}" for phase in phases)]
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


def _number(value: float) -> str:
    """One decimal, and no minus before a zero."""
    text = f"{value:,.1f}"
    return "0.0" if text == "-0.0" else text


def _merged(plan: Plan, side: Side) -> dict[str, list[float]]:
    """Name -> bytes per phase; the small parts of a side in one row, the last."""
    rows: dict[str, list[float]] = {}
    for index, phase in enumerate(plan.phases):
        for part in phase.parts:
            if part.side is side:
                rows.setdefault(part.name, [0.0] * len(plan.phases))[index] += part.nbytes
    small = [name for name, values in rows.items() if max(values) < SMALL * plan.peak.nbytes]
    named = {shown(name): values for name, values in rows.items() if len(small) < 2 or name not in small}
    if len(small) > 1:
        named[SMALL_ROW] = [sum(column) for column in zip(*(rows[name] for name in small), strict=True)]
    return named


def _bars(plan: Plan) -> list[str]:
    whole = max([plan.memory or 0, *(phase.nbytes for phase in plan.phases)])
    lines = [_bar(phase, whole, plan) for phase in plan.phases]
    used = {_kind(part) for phase in plan.phases for part in phase.parts}
    legend = [f"{letter} {meaning}" for letter, meaning in KINDS.items() if letter in used]
    legend += ["| usable"] if plan.budget is not None else []
    rows = textwrap.wrap("  ".join(word.replace(" ", HARD) for word in legend), columns() - 2)  # no meaning is cut
    return [*lines, *(f"  {row}".replace(HARD, " ") for row in rows)]


def _bar(phase: Phase, whole: int, plan: Plan) -> str:
    cells, filled, bar = "", 0.0, min(BAR, columns() - BESIDE_BAR)
    for kind in KINDS:
        filled += sum(part.nbytes for part in phase.parts if _kind(part) == kind)
        cells += kind * (round(filled / whole * bar) - len(cells))
    cells = f"{cells:.<{bar}}"
    share = ""
    if plan.budget is not None and plan.memory:
        at = min(round(plan.budget / whole * bar), bar - 1)
        cells = cells[:at] + "|" + cells[at + 1 :]
        share = f"{100 * phase.nbytes / plan.budget:.0f}%"
    return f"{phase.name:<8} {cells} {share:>5} {size(phase.nbytes)}"


def _kind(part: Part) -> str:
    if part.name.startswith(BASE):
        return "B" if part.side is Side.trainer else "E"
    if part.side is Side.engine or part.name in ("CUDA context", "libraries"):
        return "k" if part.name == "KV cache" else "o"
    return "a" if part.certain else "x"


def _answer(plan: Plan, command: str) -> list[str]:
    trains, n = command == "train", plan.lengths
    prompt = plan.config.rollout.max_prompt_tokens
    what = f"for prompts of {prompt:,} and responses of {n.longest - prompt:,} tokens"
    answer = verdict(plan, trains=trains)
    if not plan.fits:
        rows = [("fits", f"NO, {what}"), *(("limit", reason) for reason in plan.limits)]
        if not plan.layout.on_gpu and (plan.memory is None or plan.certain_bytes <= plan.memory):
            rows.append(("but", f"on a CPU these are upper bounds: orbit {command} starts it all the same"))
        rows += _remedies(plan, command)
    elif plan.budget is None:
        rows = [("fits", f"cannot be told: {_unknown(plan)}"), *_missing(plan, command)]
    else:
        left = size(plan.budget - plan.peak.nbytes)
        where = " on each GPU" if plan.layout.on_gpu else ""
        but = "; Orbit cannot run it yet (below)" if answer is Verdict.not_built else ""
        rows = [("fits", f"yes, {what}, with {left} left{where}{but}"), *_missing(plan, command)]
        rows += _how_far(plan, command)
    if plan.host.memory and not plan.host.limit and plan.host.parts:
        took, has = size(plan.host.nbytes), size(plan.host.memory)
        rows.append(("host", f"memory.offload=swap takes {took} of the machine's own memory, which has {has}"))
    rows += [("note", text) for text in notes(plan, trains=trains)[:NOTES]]
    return _lines(rows)


def _unknown(plan: Plan) -> str:
    """What is not known without hardware.memory_mib, and what the sum lacks then."""
    engine, why = plan.config.engine, "hardware.memory_mib is not set; set it to what nvidia-smi shows, in MiB"
    if engine.max_total_tokens is not None or not plan.layout.on_gpu:
        return why
    share = f"engine.mem_fraction_static={engine.mem_fraction_static:g} of a GPU"
    return (
        f"{why}. Not in the sum: SGLang fills {share} with base, slots and cache, as engine.max_total_tokens is not set"
    )


def _missing(plan: Plan, command: str) -> list[tuple[str, str]]:
    """What Orbit cannot do yet, and what it can instead."""
    trains = command == "train"
    missing = not_built(plan, trains=trains)
    if not missing:
        return []
    today = runs_today(plan, trains=trains)
    rows = [("not built", f"Orbit cannot {VERBS[command]} this yet: it needs {listed(missing)}")]
    return rows + (_advice("today", today) if today else [])


def _how_far(plan: Plan, command: str) -> list[tuple[str, str]]:
    """How much longer and larger it could be."""
    rows = [("longest", longest_words(plan, trains=command == "train"))]
    if command == "train":
        rows.append(("largest", micro_batch_words(plan)))
    if plan.layout.on_gpu:
        rows.append(("cache", f"grown into what is left it would hold {_sequences(sequences_at_once(plan))}"))
    return rows


def _sequences(number: int) -> str:
    return f"{number:,} sequence{'s' * (number != 1)} of full length at once"


def _remedies(plan: Plan, command: str) -> list[tuple[str, str]]:
    """What to set: the nearest config that fits, and where Orbit cannot run that yet, the nearest that it can."""
    trains = command == "train"
    nearest = nearest_fit(plan, trains=trains)
    if nearest is None:
        return [("nearest", "nothing in reach makes it fit: choose a smaller model"), *_missing(plan, command)]
    rows = _advice("nearest", nearest)
    missing = not_built(nearest.plan, trains=trains)
    if missing:
        rows.append(("not built", f"Orbit cannot {VERBS[command]} that yet: it needs {listed(missing)}"))
        today = runs_today(plan, trains=trains)
        rows += _advice("today", today) if today else [("today", _nothing_today(missing))]
    return rows


def _nothing_today(missing: list[str]) -> str:
    """No more than is known: without a trainer or an engine nothing can run, else only so much was tried."""
    families = without_model(missing)
    return f"nothing, before there is {listed(families)}" if families else "none of the changes that were tried"


def _advice(label: str, nearest: Nearest) -> list[tuple[str, str]]:
    """The overrides to paste, and why each."""
    pasted = " ".join(shlex.quote(text) for text in nearest.overrides)
    return [(label, f"set {pasted} ({'; '.join(change.why for change in nearest.changes)})")]


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    """Labelled sentences, wrapped."""
    lines: list[str] = []
    for label, text in rows:
        start = f"{label:<11}"
        lines += wrapped(start, text)
    return lines
