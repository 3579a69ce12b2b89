"""A part of a plan: a number of bytes with the formula that gave it. All figures of the planner are made of these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GB = 1e9
GIB = 1 << 30
BASE = "base: "  # begins the names of the base's parts


class Side(StrEnum):
    """Whose process holds it."""

    trainer = "trainer"
    engine = "engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Bytes on one GPU (or in the machine's memory, on a CPU) in one phase.

    >>> Part(name="optimizer moments", side=Side.trainer, nbytes=8 * 496, formula="2 x 4 B x 496").key
    'trainer/optimizer moments'
    """

    name: str
    side: Side
    nbytes: int
    formula: str
    certain: bool = False  # cannot be less, whatever the lengths turn out to be

    @property
    def key(self) -> str:
        return f"{self.side}/{self.name}"


def size(nbytes: float, digits: int = 1) -> str:
    """Bytes for people, in powers of 1000.

    >>> size(95_730_000_000), size(31_000_000), size(1.6e18)
    ('95.7 GB', '31.0 MB', '1.6 EB')
    """
    for unit, scale in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes / 1e3:.0f} kB" if nbytes else "0"


def sizes_apart(one: float, other: float) -> tuple[str, str]:
    """Two sizes with as many digits as it takes to tell them apart.

    >>> sizes_apart(188_400_473_000, 188_400_000_000), sizes_apart(2e9, 1e9)
    (('188.4005 GB', '188.4000 GB'), ('2.0 GB', '1.0 GB'))
    """
    digits = next((n for n in range(1, 9) if size(one, n) != size(other, n)), 1)
    return size(one, digits), size(other, digits)


def count(number: float) -> str:
    """A count for people.

    >>> count(1_026_879_376_368), count(2_321_280), count(870)
    ('1.027 T', '2.32 M', '870')
    """
    for unit, scale, digits in (("T", 1e12, 3), ("B", 1e9, 2), ("M", 1e6, 2)):
        if number >= scale:
            return f"{number / scale:.{digits}f} {unit}"
    return f"{number:,.0f}"
