"""Grouped products by way of decoded weights, a bounded chunk of experts at a time: for devices or sizes where it wins.

Experts are decoded into one of two buffers that together hold at most `budget` bytes while the other is multiplied on a
second stream; experts without rows are passed over. The routing is read on the host once; beside the buffers there is
the product of one chunk. This path is for GPUs and formats that the kernels of grouped.py were not written for. On an
H200 (docs/benchmarks.md) the kernels take 0.2 to 0.7 of its time up to 16,384 tokens of INT4 or MXFP4 and about the
same at 65,536; chunks win from 16,384 tokens on for NVFP4 and FP8, and `path="fastest"` of experts.py takes them there.

Shape letters: R rows sorted by expert, E experts, N outputs, K inputs, C experts of a chunk.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from orbit_kernels.chunk_decode import decode_experts
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
    if hit:
        run = _on_two_streams if rows.is_cuda else _in_turn
        run(_Product(rows, weight, offsets, bounds, hit, gradient, out), min(size, len(hit)))
    return out


class _Product:
    """One call's tensors, and its two steps for a chunk hit[first:last] of the experts that have rows."""

    def __init__(self, rows, weight, offsets, bounds, hit, gradient, out):
        self.rows, self.weight, self.out = rows, weight, out
        self.bounds, self.hit, self.gradient = bounds, hit, gradient
        self.index = torch.tensor(hit, device=rows.device)
        self.ends = offsets.index_select(0, self.index + 1)  # here, since a copy from the host waits for the device

    def buffer(self, experts: int) -> Tensor:
        return self.rows.new_empty(experts, *self.weight.shape[1:])

    def decode(self, first: int, last: int, buffer: Tensor) -> Tensor:
        return decode_experts(self.weight, self.index[first:last], buffer[: last - first])

    def multiply(self, first: int, last: int, dense: Tensor) -> None:
        """Those between two experts of a chunk have no rows."""
        begin, end = self.bounds[self.hit[first]], self.bounds[self.hit[last - 1] + 1]
        if self.rows.is_cuda:
            matrices = dense if self.gradient else dense.transpose(1, 2)
            self.out[begin:end] = torch._grouped_mm(self.rows[begin:end], matrices, self.ends[first:last] - begin)
            return
        for expert, matrix in zip(self.hit[first:last], dense, strict=True):
            own = slice(self.bounds[expert], self.bounds[expert + 1])
            self.out[own] = self.rows[own] @ (matrix if self.gradient else matrix.T)


def elapsed_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call on the current GPU, waited for."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


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


def _in_turn(product: _Product, size: int) -> None:
    buffer = product.buffer(size)
    for first in range(0, len(product.hit), size):
        last = min(first + size, len(product.hit))
        product.multiply(first, last, product.decode(first, last, buffer))


def _on_two_streams(product: _Product, size: int) -> None:
    """Decode chunk i + 1 while chunk i is multiplied, each in the buffer that chunk i - 1 has left."""
    main, side = torch.cuda.current_stream(), _decode_stream(product.rows.device)
    buffers = [product.buffer(size) for _ in range(1 if size == len(product.hit) else 2)]
    multiplied: list[torch.cuda.Event] = []
    side.wait_stream(main)
    for number, first in enumerate(range(0, len(product.hit), size)):
        last = min(first + size, len(product.hit))
        if number > 1:
            side.wait_event(multiplied[number - 2])
        with torch.cuda.stream(side):
            dense = product.decode(first, last, buffers[number % 2])
        main.wait_stream(side)
        product.multiply(first, last, dense)
        multiplied.append(main.record_event())


@functools.cache
def _decode_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
