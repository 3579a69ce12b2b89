"""Seeds of single samples: a pure function of the run's seed and the place of the sample, so that a resumed run draws
what the uninterrupted one would have drawn."""

from __future__ import annotations

import hashlib


def sample_seed(seed: int, *place: int | str) -> int:
    """A 31-bit seed for one sample.

    >>> sample_seed(0, "train", 3, 1, 7) == sample_seed(0, "train", 3, 1, 7) != sample_seed(0, "train", 3, 1, 6)
    True
    """
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF
