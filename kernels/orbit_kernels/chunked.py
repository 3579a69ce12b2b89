"""Grouped products by way of decoded weights, a bounded chunk of experts at a time: for devices or sizes where it wins.

Experts are decoded into one of two buffers that together hold at most `budget` bytes while the other is multiplied on a
second stream; experts without rows are passed over. The routing is read on the host once. This path is for GPUs whose
matrix unit the kernels of grouped.py were not written for; it has not been timed against them yet, and `path="fastest"`
of experts.py times both where it runs.

Shape letters: R rows sorted by expert, E experts, N outputs, K inputs, C experts of a chunk.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from orbit_kernels.decode import dequantize
from orbit_kernels.grouped import PackedExperts

BUDGET = 1 << 30


def chunked_product(
    rows: Tensor,
    weight: PackedExperts,
    offsets: Tensor,
    *,
    gradient: bool = False,
    split: bool = False,
    budget: int = BUDGET,
) -> Tensor:
    """y [R, N] = rows [R, K] W_e^T, or dx [R, K] = rows [R, N] W_e with `gradient`; columns in their natural order.

    `split` as in grouped.py: the rows, or with `gradient` the result, are one matrix [P, R, K] per part of N.
    Raises ValueError if `budget` bytes do not hold two decoded experts.
    """
    if split:
        sources = rows.chunk(weight.parts, 1) if gradient else rows
        parts = [
            chunked_product(own, weight.part(p), offsets, gradient=gradient, budget=budget)
            for p, own in enumerate(sources)
        ]
        return torch.stack(parts) if gradient else torch.cat(parts, 1)
    experts, outputs, inputs = weight.shape
    bytes_each = outputs * inputs * rows.element_size()
    size = budget // (2 * bytes_each)
    if size < 1:
        raise ValueError(
            f"a budget of {budget} bytes does not hold two experts of {bytes_each}; set at least their sum"
        )
    bounds = offsets.tolist()  # the one wait for the device
    hit = [expert for expert in range(experts) if bounds[expert + 1] > bounds[expert]]
    out = rows.new_empty(len(rows), inputs if gradient else outputs)
    run = _on_two_streams if rows.is_cuda else _in_turn
    run([hit[first : first + size] for first in range(0, len(hit), size)], rows, weight, bounds, gradient, out)
    return out


def decoded_chunk(weight: PackedExperts, experts: list[int], dtype: torch.dtype) -> Tensor:
    """[C, N, K] of the given experts; parts are decoded one by one since FP8 blocks do not cross them."""
    index = torch.tensor(experts, device=weight.packed.device)
    packed = _take(weight.packed, index).chunk(weight.parts, 1)
    scale = [None] * weight.parts if weight.scale is None else _take(weight.scale, index).chunk(weight.parts, 1)
    shared = None if weight.global_scale is None else weight.global_scale[index]
    parts = [dequantize(own, s, weight.fmt, dtype, shared) for own, s in zip(packed, scale, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def fastest(paths: dict[str, Callable[[], object]], key: str, cache: Path, measure: Callable) -> str:
    """The name of the fastest path for `key`, measured on this device once and remembered in the file `cache`.

    `measure(call)` gives a time. A cache that cannot be read is measured again and replaced.
    """
    known = _read(cache)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = known.get(device, {}).get(key)
    if found not in paths:
        times = {name: measure(call) for name, call in paths.items()}
        found = min(times, key=times.get)
        known.setdefault(device, {})[key] = found
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1) + "\n")
        partial.replace(cache)
    return found


def _read(cache: Path) -> dict:
    try:
        return json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """index_select that also takes FP8."""
    return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)


def _multiply(chunk: list[int], dense: Tensor, rows: Tensor, bounds: list[int], gradient: bool, out: Tensor) -> None:
    """Products of the rows of a chunk's experts; those between two hit experts have no rows."""
    first, last = bounds[chunk[0]], bounds[chunk[-1] + 1]
    if rows.is_cuda:
        ends = torch.tensor([bounds[expert + 1] - first for expert in chunk], dtype=torch.int32, device=rows.device)
        matrices = dense if gradient else dense.transpose(1, 2)
        out[first:last] = torch._grouped_mm(rows[first:last], matrices, ends)
        return
    for expert, matrix in zip(chunk, dense, strict=True):
        own = slice(bounds[expert], bounds[expert + 1])
        out[own] = rows[own] @ (matrix if gradient else matrix.T)


def _in_turn(chunks, rows, weight, bounds, gradient, out) -> None:
    for chunk in chunks:
        _multiply(chunk, decoded_chunk(weight, chunk, rows.dtype), rows, bounds, gradient, out)


def _on_two_streams(chunks, rows, weight, bounds, gradient, out) -> None:
    """Decode chunk i + 1 while chunk i is multiplied; at most two decoded chunks are alive."""
    main, side = torch.cuda.current_stream(), _decode_stream(rows.device)
    multiplied: list[torch.cuda.Event] = []
    for number, chunk in enumerate(chunks):
        side.wait_stream(main) if number == 0 else side.wait_event(multiplied[max(number - 2, 0)])
        with torch.cuda.stream(side):
            dense = decoded_chunk(weight, chunk, rows.dtype)
        main.wait_stream(side)
        _multiply(chunk, dense, rows, bounds, gradient, out)
        dense.record_stream(main)
        multiplied.append(main.record_event())


@functools.cache
def _decode_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
