"""Tables of `orbit plan`: a line per combination (-m), and the published study (--compare)."""

from __future__ import annotations

import shlex
import textwrap

from orbit_cli.planner.advice import nearest_fit
from orbit_cli.planner.built import Verdict, listed, not_built, verdict
from orbit_cli.planner.part import count, size
from orbit_cli.planner.plan import Plan
from orbit_cli.planner.study import FROZEN, RECIPES, Row
from orbit_cli.planner.today import runs_today

WIDTH, OWN = 120, 46
NOTE_WIDTH = 100
ANSWERS = {Verdict.runs: "yes", Verdict.not_built: "not built", Verdict.too_large: "no", Verdict.unknown: "?"}


def plans_text(made: list[tuple[list[str], Plan | str]], *, command: str = "train") -> str:
    """One line per combination of overrides, in their order: its plan, or why it cannot be laid out."""
    shared = [text for text in made[0][0] if all(text in chosen for chosen, _ in made)] if len(made) > 1 else []
    owned = [" ".join(text for text in chosen if text not in shared) for chosen, _ in made]
    width = max(min(max(map(len, owned)), OWN), len("overrides"))
    phases = ["train", "rollout"] if command == "train" else ["rollout"]
    head = f"{'overrides':<{width}}  " + "".join(f"{name:>9} " for name in (*phases, "usable"))
    lines = [f"{head} {'runs today':<11}what to set, or what is missing"]
    for own, (_, one) in zip(owned, made, strict=True):
        if isinstance(one, str):
            start = f"{own:<{width}}  {' ' * 10 * (len(phases) + 1)} {'refused':<11}"
            then = one
        else:
            sizes = [*(size(phase.nbytes) for phase in one.phases), "?" if one.budget is None else size(one.budget)]
            start = f"{own:<{width}}  {''.join(f'{text:>9} ' for text in sizes)} "
            start += f"{ANSWERS[verdict(one, trains=command == 'train')]:<11}"
            then = _then(one, command)
        lines += textwrap.wrap(start + then, WIDTH, subsequent_indent=" " * len(start), drop_whitespace=False)
    about = ["bytes on each GPU (on a CPU: of this machine); 1 GB = 10^9 bytes"]
    about += [f"for all: {' '.join(shared)}"] if shared else []
    end = []
    if any(
        not isinstance(one, str) and verdict(one, trains=command == "train") is Verdict.not_built for _, one in made
    ):
        end = ["not built: it fits, and Orbit cannot run it yet"]
    return "\n".join(line.rstrip() for line in [*about, *lines, *end])


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
    names = [*RECIPES, FROZEN]
    lines = [
        "The memory study of Orbit's blog (github.com/Sphere-AI-Lab/orbit): weights and gradients alone, N (w + g) / 8",
        "bytes at w and g bits, N rounded to three digits. To plan a machine, believe the lower table: real files.",
        "",
        f"{'GB (10^9 bytes)':<18} {'N rounded':>10}  " + "  ".join(f"{name:>15}" for name in names),
    ]
    for row in rows:
        cells = "  ".join(f"{row.recipe_bytes[name] / 1e9:>15,.0f}" for name in names)
        lines.append(f"{row.name:<18} {_rounded(row.rounded_parameters):>10}  {cells}")
    head = f"{'parameters':>10}  {'adapter':>9}  {'bit/param':>9}  {'4-bit base, GB':>14}  {'+ adapter, gradients':>20}"
    lines += ["", f"{'real files':<18} {head}"]
    for row in rows:
        lines.append(
            f"{row.name:<18} {count(row.parameters):>10}  {count(row.adapter_parameters):>9}  "
            f"{row.adapter_bits:>9.4f}  "
            f"{row.base_bytes / 1e9:>14,.2f}  {row.base_and_adapter_bytes / 1e9:>20,.1f}"
        )
    note = (
        "adapter: its parameters, OFT in blocks of 32 on the study's linears, one rotation for gate and up; bit/param: "
        "16 bit of each, spread over the model's parameters. The study counts 4.0 bit for every weight and leaves out: "
        "scales (INT4 with a BF16 scale per 32 is 4.5 bit, MXFP4 4.25), attention, embeddings and shared experts in "
        "BF16 or FP8, and in all recipes optimizer moments, master weights, activations and caches. "
        "`orbit plan model=NAME` counts all of it."
    )
    return "\n".join([*lines, "", *textwrap.wrap(note, NOTE_WIDTH)])


def _rounded(number: float) -> str:
    """Three digits.

    >>> _rounded(1.03e12), _rounded(30.5e9)
    ('1.03 T', '30.5 B')
    """
    unit, scale = ("T", 1e12) if number >= 1e12 else ("B", 1e9)
    return f"{number / scale:.3g} {unit}"
