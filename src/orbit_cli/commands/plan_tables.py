"""Tables of `orbit plan`: a line per combination (-m), and the published study (--compare)."""

from __future__ import annotations

import shlex
import textwrap

from orbit_cli.commands.width import columns
from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.built import Verdict, listed, not_built, verdict
from orbit_cli.planner.part import count, size
from orbit_cli.planner.plan import Plan
from orbit_cli.planner.study import FROZEN, RECIPES, Row
from orbit_cli.planner.today import runs_today

WIDE = 120  # columns of a terminal that are made use of for a line per combination
BESIDE = 40  # columns that advice needs to stand beside its figures; with fewer it stands below
STUDY = 90  # columns of the study's tables; with fewer a model has lines of its own
ANSWERS = {Verdict.runs: "yes", Verdict.not_built: "not built", Verdict.too_large: "no", Verdict.unknown: "?"}


def plans_text(made: list[tuple[list[str], Plan | str]], *, command: str = "train", width: int | None = None) -> str:
    """One row per combination of overrides, in their order: its plan, or why it cannot be laid out.

    `width` is the terminal's (None: asked). Each key that varies has a column; where they leave no room for the
    figures, a combination stands in a line of its own above these. Figures are never cut.
    """
    width = width or columns(widest=WIDE)
    shared = [text for text in made[0][0] if all(text in chosen for chosen, _ in made)]
    owned = [[text for text in chosen if text not in shared] for chosen, _ in made]
    figures, answers = _figures([one for _, one in made], command)
    heads, cells, legend = _keys(owned, width - len(figures[0]) - 2)
    lines = _wrapped("bytes on each GPU (on a CPU: of this machine); 1 GB = 10^9 bytes", width, "  ")
    lines += _wrapped(f"for all: {' '.join(shared)}", width, "  ") if shared else []
    lines += _wrapped(legend, width, "  ") if legend else []
    start = f"{heads}  " if heads else ""
    room = width - len(start) - len(figures[0]) - 2
    what, below = "what to set, or what is missing", room < BESIDE
    lines.append(f"{start}{figures[0]}  {'' if below else what}")
    for own, key, figure, answer in zip(owned, cells, figures[1:], answers, strict=True):
        if own and not heads:
            lines += _wrapped(" ".join(own), width, "  ")
        row = f"{key}  {figure}" if heads else figure
        advice = _wrapped(answer, width - 4 if below else room, "") or [""]
        if below:
            lines += [row, *(f"    {text}" for text in advice)]
        else:
            lines += [f"{row if number == 0 else ' ' * len(row)}  {text}" for number, text in enumerate(advice)]
    if "not built" in [figure.rpartition("  ")[2].strip() for figure in figures]:
        lines.append("not built: it fits, and Orbit cannot run it yet")
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _figures(plans: list[Plan | str], command: str) -> tuple[list[str], list[str]]:
    """The head and a row of figures each, all as long; and what to set, what is missing, or why it is refused."""
    phases = ["train", "rollout"] if command == "train" else ["rollout"]
    rows, answers = [[*phases, "usable", "runs today"]], []
    for one in plans:
        if isinstance(one, str):
            rows.append([*[""] * len(phases), "", "refused"])
            answers.append(one)
            continue
        sizes = [*(size(phase.nbytes) for phase in one.phases), "?" if one.budget is None else size(one.budget)]
        rows.append([*sizes, ANSWERS[verdict(one, trains=command == "train")]])
        answers.append(_then(one, command))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *numbers, last in rows:
        cells = [f"{text:>{wide}}" for text, wide in zip(numbers, widths[:-1], strict=True)]
        lines.append("  ".join([*cells, f"{last:<{widths[-1]}}"]))
    return lines, answers


def _keys(owned: list[list[str]], room: int) -> tuple[str, list[str], str]:
    """A column of values for each key that varies: the head, a row each, and the whole names of keys that were
    shortened. No head where they take more than `room`."""
    keys = list(dict.fromkeys(text.partition("=")[0] for own in owned for text in own))
    values = [dict(text.partition("=")[::2] for text in own) for own in owned]
    last = [key.rpartition(".")[2] for key in keys]
    for names in (keys, last):
        rows = [[row.get(key, "") for key in keys] for row in values]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        if keys and len(set(names)) == len(names) and sum(widths) + 2 * len(widths) - 2 <= room:
            head, *lines = (
                "  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)) for row in (names, *rows)
            )
            short = [f"{name} is {key}" for name, key in zip(names, keys, strict=True) if name != key]
            return head, lines, "; ".join(short)
    return "", [""] * len(owned), ""


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _then(plan: Plan, command: str) -> str:
    """The last column: what is missing, or the nearest config, one that runs today if there is one."""
    trains = command == "train"
    answer = verdict(plan, trains=trains)
    if answer in (Verdict.runs, Verdict.unknown):
        return ""
    today = runs_today(plan, trains=trains)
    if today is not None:
        return f"set {' '.join(shlex.quote(text) for text in today.overrides)}"
    if answer is Verdict.not_built:
        return f"needs {listed(not_built(plan, trains=trains))}"
    nearest = nearest_fit(plan, trains=trains)
    if nearest is None:
        return "nothing makes it fit"
    pasted = " ".join(shlex.quote(text) for text in nearest.overrides)
    return f"set {pasted} (fits, not built)"


def study_text(rows: list[Row]) -> str:
    """The table of `--compare`, and what its formula leaves out."""
    about = (
        "The memory study of Orbit's blog (github.com/Sphere-AI-Lab/orbit): weights and gradients alone, N (w + g) / 8 "
        "bytes at w and g bits, N rounded to three digits. To plan a machine, believe the lower table: real files."
    )
    width = columns()
    lines = [*_wrapped(about, width, ""), "", *(_study_table(rows) if width >= STUDY else _study_lists(rows))]
    note = (
        "adapter: its parameters, OFT in blocks of 32 on the study's linears, one rotation for gate and up; bit/param: "
        "16 bit of each, spread over the model's parameters. The study counts 4.0 bit for every weight and leaves out: "
        "scales (INT4 with a BF16 scale per 32 is 4.5 bit, MXFP4 4.25), attention, embeddings and shared experts in "
        "BF16 or FP8, and in all recipes optimizer moments, master weights, activations and caches. "
        "`orbit plan model=NAME` counts all of it."
    )
    return "\n".join([*lines, "", *_wrapped(note, width, "")])


def _study_table(rows: list[Row]) -> list[str]:
    """The study and the real files, a line for each model."""
    names = [*RECIPES, FROZEN]
    lines = [f"{'GB (10^9 bytes)':<17} {'N rounded':>10}  " + "  ".join(f"{name:>12}" for name in names)]
    for row in rows:
        cells = "  ".join(f"{row.recipe_bytes[name] / 1e9:>{max(12, len(name))},.0f}" for name in names)
        lines.append(f"{row.name:<17} {_rounded(row.rounded_parameters):>10}  {cells}")
    lines.append("")
    lines.append(f"{'real files':<17} {'parameters':>10}  " + "  ".join(name for name, _ in _real(rows[0])[1:]))
    for row in rows:
        (_, parameters), *others = _real(row)
        cells = "  ".join(f"{value:>{len(name)}}" for name, value in others)
        lines.append(f"{row.name:<17} {parameters:>10}  {cells}")
    return lines


def _study_lists(rows: list[Row]) -> list[str]:
    """As `_study_table`, a line for each figure."""
    lines = ["GB (10^9 bytes)"]
    for row in rows:
        lines += ["", f"{row.name}, N rounded {_rounded(row.rounded_parameters)}"]
        lines += [f"  {name:<24} {row.recipe_bytes[name] / 1e9:>10,.0f}" for name in [*RECIPES, FROZEN]]
        lines += ["  real files", *(f"    {name:<22} {value:>10}" for name, value in _real(row))]
    return lines


def _real(row: Row) -> list[tuple[str, str]]:
    """What is said of a model's real files: name and figure."""
    return [
        ("parameters", count(row.parameters)),
        (f"{'adapter':>9}", count(row.adapter_parameters)),
        ("bit/param", f"{row.adapter_bits:.4f}"),
        ("4-bit base, GB", f"{row.base_bytes / 1e9:,.2f}"),
        ("+ adapter, gradients", f"{row.base_and_adapter_bytes / 1e9:,.1f}"),
    ]


def _rounded(number: float) -> str:
    """Three digits.

    >>> _rounded(1.03e12), _rounded(30.5e9)
    ('1.03 T', '30.5 B')
    """
    unit, scale = ("T", 1e12) if number >= 1e12 else ("B", 1e9)
    return f"{number / scale:.3g} {unit}"
