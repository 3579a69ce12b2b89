"""`orbit plan --explain`: every number with its formula and totals, and every word of the plan in one line."""

from __future__ import annotations

from orbit_cli.commands.plan_text import heading
from orbit_cli.commands.width import wrapped
from orbit_cli.planner.lengths import adds_up
from orbit_cli.planner.part import Part, Side, size
from orbit_cli.planner.plan import Plan
from orbit_cli.planner.words import meanings, shown

NAMES = 32


def formulas_text(plan: Plan) -> str:
    """The formulas by side, the totals by phase, the words, and all notes but the advice."""
    where = "each GPU" if plan.layout.on_gpu else "this machine"
    lines = [*heading(plan, rows=2), "", f"bytes on {where} (MB = 10^6, GB = 10^9, GiB = 2^30 bytes)"]
    names: list[str] = []
    for side in Side:
        found = _parts(plan, side)
        if found:
            totals = ", ".join(f"{phase.name} {size(phase.of(side))}" for phase in plan.phases)
            lines += ["", *wrapped(f"{side}: ", totals)]
            lines += [line for part, only in found for line in _explained(part, only)]
            names += [part.name for part, _ in found]
    if plan.host.parts:
        lines += ["", f"the machine's own memory: {size(plan.host.nbytes)}"]
        for part in plan.host.parts:
            lines += wrapped(f"  {f'{part.side}: {part.name}':<{NAMES}} {size(part.nbytes):>8} = ", part.formula)
    lines.append("")
    for phase in plan.phases:
        sides = " + ".join(f"{side} {size(phase.of(side))}" for side in Side if phase.of(side))
        lines += wrapped(f"{phase.name:<9}", f"{size(phase.nbytes)} = {sides}")
        if phase.moment:
            lines += wrapped("         ", f"at the largest of the moments of a step: {phase.moment}")
    if plan.budget is not None and plan.memory:
        headroom = plan.config.memory.headroom
        usable = f"{size(plan.budget)} = {size(plan.memory)} x (1 - memory.headroom={headroom:g})"
        lines += wrapped(f"{'usable':<9}", usable)
    if any(phase.name == "train" for phase in plan.phases):
        lines += wrapped("tokens   ", f"{plan.lengths.micro_tokens:,} = {adds_up(plan.config, plan.lengths)}")
    lines += ["", "words"]
    for word, meaning in meanings(names):
        lines += wrapped(f"  {word:<{NAMES}} ", meaning)
    return "\n".join(line.rstrip() for line in lines)


def _parts(plan: Plan, side: Side) -> list[tuple[Part, str]]:
    """Parts of a side, and the phase to which one belongs that is not in all of them."""
    found: dict[str, tuple[Part, str]] = {}
    for phase in plan.phases:
        for part in phase.parts:
            if part.side is side:
                alone = part.name not in found and len(plan.phases) > 1
                found[part.name] = (part, phase.name if alone else "")
    return list(found.values())


def _explained(part: Part, only: str) -> list[str]:
    while_ = f" ({only} only)" if only else ""
    return wrapped(f"  {shown(part.name):<{NAMES}} {size(part.nbytes):>8} = ", part.formula + while_)
