"""What memory.offload=swap takes of the machine's own memory: the bases that wait there. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.planner.layout import Layout
from orbit_cli.planner.part import BASE, Part, Side, size

WAITING = "base that waits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine's memory, all GPUs together; nothing is in it where nothing waits."""

    parts: tuple[Part, ...] = ()
    memory: int | None = None  # bytes; None if hardware.host_memory_mib is not set

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def limit(self) -> str:
        """Why it is too small, in a sentence; empty if it is not, or if its size is not known."""
        if self.memory is None or self.nbytes <= self.memory:
            return ""
        sides = " and ".join(f"{size(part.nbytes)} of the {part.side}" for part in self.parts)
        return (
            f"memory.offload=swap needs {size(self.nbytes)} of the machine's own memory, which has {size(self.memory)} "
            f"(hardware.host_memory_mib): bases of all GPUs, {sides}"
        )


def waiting(layout: Layout, resident: dict[Side, list[Part]]) -> tuple[Part, ...]:
    """Both bases: while they change places the one that leaves is written before the other is gone."""
    found = []
    for side, gpus in ((Side.trainer, layout.trainer_gpus), (Side.engine, layout.engine_gpus)):
        each = sum(part.nbytes for part in resident[side] if part.name.startswith(BASE))
        formula = f"{size(each)} of base x {gpus} GPU{'s' * (gpus > 1)}: while bases change places both are there"
        found.append(Part(name=WAITING, side=side, nbytes=each * gpus, formula=formula))
    return tuple(found)
