"""How much room an engine keeps for adapters: which linears, which shapes, how many versions at a time.

The engine's owner writes it into one environment variable before SGLang starts; every SGLang process reads it there,
because SGLang hands its adapter manager nothing but its own server arguments. Left out: the adapters themselves.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "ORBIT_ADAPTER_ROOM"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRoom:
    """Static sizes of the adapter buffers. A kind with size 0 has no room and is refused when it is pushed.

    >>> AdapterRoom(targets=("q_proj",), expert_targets=(), block_size=32, rank=0, versions=2)
    """

    targets: tuple[str, ...]  # names of linears: last path component
    expert_targets: tuple[str, ...]  # projections of routed experts
    block_size: int  # OFT; 0: no OFT on this engine
    rank: int  # LoRA; 0: no LoRA on this engine
    versions: int  # slots beside slot 0, which is the base
    expert_width: str = "per_expert"  # or "shared": one rotation of what the routed experts of a layer get
    scaling: float = 1.0  # LoRA's, of every version: kernels of experts on a GPU have it built into their CUDA graphs


def write_room(room: AdapterRoom, environment: dict[str, str]) -> None:
    """Put the room where `read_room` of a child process finds it."""
    environment[VARIABLE] = json.dumps(asdict(room))


def read_room() -> AdapterRoom:
    """The room of this engine. Raises RuntimeError when the engine was not started by Orbit."""
    text = os.environ.get(VARIABLE)
    if text is None:
        raise RuntimeError(
            f"{VARIABLE} is not set, so the size of the adapter buffers is unknown; start the engine through "
            "orbit_cli.engine, or set SGLANG_PLUGINS to a list without orbit"
        )
    fields = json.loads(text)
    return AdapterRoom(
        targets=tuple(fields["targets"]),
        expert_targets=tuple(fields["expert_targets"]),
        block_size=fields["block_size"],
        rank=fields["rank"],
        versions=fields["versions"],
        expert_width=fields["expert_width"],
        scaling=fields["scaling"],
    )
