"""`python -m orbit_kernels.bench`: the expert kernels against every other way to multiply by the same 4-bit experts.

    python -m orbit_kernels.bench                  # all shapes, formats, sizes and paths (bench_plan.py)
    python -m orbit_kernels.bench --record         # what docs/benchmarks.md shows, most important first
    python -m orbit_kernels.bench --shapes kimi-k2.6 --formats int4 --tokens 4096 [--decoding]
    python -m orbit_kernels.bench --tables FILE    # the tables of a finished file as Markdown; needs no GPU

Prints every row and rewrites the JSON after every size, so that a run that is cut keeps what it has. Random weights,
activations and routing; medians. A row: shape, format, tokens, path, pass, ms, ratio_bf16,
tflops, bandwidth_share, transient_bytes, graph (timed as replays of a CUDA graph, the sizes of decoding).

pass      forward, gradient: the two products (w13, w2) alone; mlp: the whole MLP's forward as an engine runs it,
          with routing, SwiGLU and weighted sum; layer: the whole MLP as a trainer runs it, forward and backward;
          products: both passes of the products alone, timed beside layer, which is compared with them
path      bf16 resident: `torch._grouped_mm` on weights that stay in memory; kernels: ours; chunked: chunked.py;
          eager chunks, loop over experts: decoded in PyTorch first; bitsandbytes-like: one kernel decodes an expert,
          one product uses it, as bitsandbytes' 4-bit linears do; sglang triton, sglang marlin: bench_sglang.py
ratio     ms over that of bf16 resident in the same run: the same pass, for mlp its forward, for layer and products both
share     bytes that must move (bench_paths.Problem.bytes_moved) / ms / the memory's bandwidth by its datasheet
transient peak of what a call allocates beyond its results
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

from orbit_kernels import bench_paths as paths
from orbit_kernels import bench_plan, bench_sglang
from orbit_kernels.bench_paths import Batch, Problem
from orbit_kernels.bench_plan import DECODING, DECODING_TOKENS, PEER_TOKENS, RECORD, SHAPES, TOKENS, TRAINING, Case
from orbit_kernels.bench_tables import tables
from orbit_kernels.chunked import elapsed_ms
from orbit_kernels.expert_layer import fastest_path

ADAPTERS = ("none", "oft32", "lora16")
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA B200": 8e12}
"""Bytes per second, by the vendor's datasheets."""
COLD = 16
"""Up to this many tokens decoding touches few enough experts for the cache to hold them; batches are rotated."""
BATCHES = 8
LONG = 10.0  # milliseconds; such a call reads more than the cache holds
QUEUED = 80.0  # milliseconds of queued calls that a median is taken of, if these are more than three
WRONG = 0.03
"""Relative difference to the kernels above which another's output is not the same computation in BF16."""


def time_ms(
    calls: list[Callable[[], object]], rounds: int = 2, graph: bool = False, queued: bool = False
) -> list[float]:
    """Median milliseconds of each call, over `rounds` in which each is repeated by itself.

    By itself, since a GPU at its power limit runs a call faster after one that drew less; in rounds, so that a GPU that
    slows down slows all of them. `graph` times replays of a CUDA graph, for calls that are shorter than their launches;
    with `queued`, and where a call is longer than LONG, calls wait in the device's queue; do_bench times others.
    """
    for call in calls:
        call()
    if graph:
        one = functools.partial(do_bench_cudagraph, rep=20, return_mode="median")
    elif queued or max(map(elapsed_ms, calls)) > LONG:
        one = _queued_ms
    else:
        one = functools.partial(do_bench, warmup=5, rep=25, return_mode="median")
    found = [[one(call) for call in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def _queued_ms(call: Callable[[], object]) -> float:
    """Median of calls that wait in the device's queue, as a trainer's do: the host's way to a first kernel is not in
    them."""
    count = max(3, round(QUEUED / elapsed_ms(call)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks))


def transient(call: Callable[[], object], named: int) -> int:
    """Peak bytes that a call allocates beyond `named`, those of its results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - named)


@dataclass(slots=True)
class Run:
    """The rows so far, and where they go."""

    out: Path
    about: dict
    rows: list[dict]
    left_out: list[str]
    began: float

    def add(
        self, case: Case, problem: Problem, batch: Batch, path: str, pass_: str, ms: float, base: float, spare: int
    ):
        """Keep and print one row; `base` is the time of BF16 weights in memory."""
        _, hidden, inter, slots = SHAPES[case.shape]
        tokens = len(batch.x)
        products = {"forward": 1, "gradient": 1, "mlp": 1, "layer": 2, "products": 2}[pass_]
        moved = problem.bytes_moved(batch, pass_, path == "bf16 resident")
        row = {
            "shape": case.shape, "format": case.format, "tokens": tokens, "path": path, "pass": pass_,
            "ms": round(ms, 5), "ratio_bf16": round(ms / base, 4),
            "tflops": round(products * 6 * tokens * slots * hidden * inter / ms / 1e9, 1),
            "bandwidth_share": round(moved / ms * 1e3 / _bandwidth(), 4), "transient_bytes": spare,
            "graph": case.decoding,
        }  # fmt: skip
        self.rows.append(row)
        print(
            f"{time.monotonic() - self.began:6.1f} s  {case.shape:13} {case.format:5} {tokens:6} {path:17} {pass_:8} "
            f"{ms:9.4f} ms {row['ratio_bf16']:7.3f} {row['tflops']:6.0f} TFLOP/s {row['bandwidth_share']:6.1%} of the "
            f"bandwidth {spare / 2**20:8.1f} MiB",
            flush=True,
        )

    def leave_out(self, what: str) -> None:
        self.left_out.append(what)
        print(f"left out: {what}", flush=True)

    def write(self) -> None:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)  # a line each, for readable differences
        head = f' "about": {json.dumps(self.about)},\n "left_out": {json.dumps(self.left_out)},'
        self.out.write_text(f'{{\n{head}\n "rows": [\n{lines}\n ]\n}}\n')


def measure(run: Run, case: Case, problem: Problem, peers: dict, tokens: int) -> None:
    """All paths of one size."""
    batches = [problem.batch(tokens) for _ in range(BATCHES if case.decoding and tokens <= COLD else 1)]
    batch, resident = batches[0], {}

    def over_batches(call: Callable[[Batch], object]) -> Callable[[], object]:
        return lambda: [call(own) for own in batches]

    for pass_ in ("forward",) if case.decoding else ("forward", "gradient"):
        fast = {"bf16 resident": paths.bf16_resident, "kernels": paths.ours}
        fast |= {"chunked": paths.chunked} if case.chunks and not case.decoding else {}
        calls = {name: lambda own, f=f, pass_=pass_: f(problem, own, pass_) for name, f in fast.items()}
        times = [ms / len(batches) for ms in time_ms([over_batches(c) for c in calls.values()], graph=case.decoding)]
        resident[pass_] = times[0]
        if tokens in case.slow:
            slow = {
                "eager chunks": paths.chunked_eager, "loop over experts": paths.expert_loop,
                "bitsandbytes-like": paths.like_bitsandbytes,
            }  # fmt: skip
            calls |= {name: lambda own, f=f, pass_=pass_: f(problem, own, pass_) for name, f in slow.items()}
            times += time_ms([functools.partial(calls[name], batch) for name in slow], rounds=1)
        for (name, call), ms in zip(calls.items(), times, strict=True):
            spare = transient(functools.partial(call, batch), batch.result_bytes(pass_))
            run.add(case, problem, batch, name, pass_, ms, resident[pass_], spare)
    if case.peers and tokens <= PEER_TOKENS:
        calls = {"kernels": functools.partial(paths.served, problem), **peers}
        calls = {name: call for name, call in calls.items() if _agrees(run, case, problem, batch, name, call)}
        times = [ms / len(batches) for ms in time_ms([over_batches(c) for c in calls.values()], graph=case.decoding)]
        for (name, call), ms in zip(calls.items(), times, strict=True):
            spare = transient(functools.partial(call, batch), batch.result_bytes("mlp"))
            run.add(case, problem, batch, name, "mlp", ms, resident["forward"], spare)
    if case.whole:
        _whole(run, case, problem, batch, sum(resident.values()))
    if case.chunks:
        _remembered(run, case, problem, batch)


def _whole(run: Run, case: Case, problem: Problem, batch: Batch, resident: float) -> None:
    """The MLP with each adapter and the kernels' products alone, in the same rounds."""
    calls = {f"layer {adapter}": paths.layer(problem, batch, adapter) for adapter in ADAPTERS}
    calls |= {"kernels": lambda: [paths.ours(problem, batch, pass_) for pass_ in ("forward", "gradient")]}
    times = time_ms(list(calls.values()), rounds=5, queued=True)
    for (name, call), ms in zip(calls.items(), times, strict=True):
        pass_ = "products" if name == "kernels" else "layer"
        named = sum(batch.result_bytes(own) for own in ("forward", "gradient")) if name == "kernels" else 0
        run.add(case, problem, batch, name, pass_, ms, resident, transient(call, named))


def _agrees(run: Run, case: Case, problem: Problem, batch: Batch, name: str, call: Callable) -> bool:
    """Whether another's MLP computes what ours does; a wrong or failing one is named and not timed."""
    try:
        expected = paths.served(problem, batch).float()
        found = ((call(batch).float() - expected).norm() / expected.norm()).item()
    except Exception as error:  # another project's kernel: whatever stops it, the other rows stand
        run.leave_out(f"{name} of {case.shape} {case.format} at {len(batch.x)} tokens: {str(error).splitlines()[0]}")
        return False
    if not found <= WRONG:
        run.leave_out(
            f"{name} of {case.shape} {case.format} at {len(batch.x)} tokens: differs from ours by {found:.3f}"
        )
    elif name != "kernels":
        print(f"{name} differs from ours by {found:.1e} of the norm", flush=True)
    return found <= WRONG


def _remembered(run: Run, case: Case, problem: Problem, batch: Batch) -> None:
    """What `path="fastest"` takes at this size, seen twice: by trial, then from its file."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "paths.json"
        arguments = (batch.x, batch.ids, batch.weights, problem.w13, problem.w2, cache)
        seen = []
        for _ in range(2):
            start = time.perf_counter()
            seen.append((fastest_path(*arguments), time.perf_counter() - start))
    key = f"{case.shape} {case.format} {len(batch.x)}"
    run.about.setdefault("fastest", {})[key] = seen[0][0]
    print(f"fastest of {key}: " + ", then ".join(f"{name} in {s * 1e3:.1f} ms" for name, s in seen), flush=True)


def _bandwidth() -> float:
    properties = torch.cuda.get_device_properties(0)
    known = BANDWIDTH.get(properties.name)
    return (
        known or 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    )  # kHz, two bits a clock and wire


def _about(out: Path) -> dict:
    arguments = [own for own in sys.argv[1:] if own not in ("--out", str(out))]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    return {
        "gpu": torch.cuda.get_device_name(), "driver": driver[0] if driver else None, "torch": torch.__version__,
        "triton": triton.__version__, "sglang": bench_sglang.version(), "date": str(datetime.date.today()),
        "command": " ".join(["python -m orbit_kernels.bench", *arguments]),
    }  # fmt: skip


def run_cases(cases: tuple[Case, ...], out: Path, seconds: float) -> None:
    """Measure the cases in their order into `out`; those that would begin after `seconds` are left out."""
    torch.manual_seed(0)
    run = Run(out, _about(out), [], [], time.monotonic())
    reason = bench_sglang.prepare() if any(case.peers for case in cases) else None
    if reason:
        run.leave_out(f"SGLang's Triton and Marlin experts: {reason}")
    for case in cases:
        if time.monotonic() - run.began > seconds:
            run.leave_out(f"{case.shape} {case.format} {'decoding' if case.decoding else 'training'}: no time left")
            continue
        problem = Problem.random(*SHAPES[case.shape], case.format)
        peers = bench_sglang.peers(problem) if case.peers and not reason else {}
        for tokens in case.tokens:
            if tokens > PEER_TOKENS:
                peers.clear()  # Marlin's copy of the weights with them
            measure(run, case, problem, peers, tokens)
            run.write()
            torch.cuda.empty_cache()
        del problem, peers
        torch.cuda.empty_cache()
    run.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("moe.json"))
    parser.add_argument("--record", action="store_true", help="the selection of docs/benchmarks.md")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES)
    parser.add_argument("--formats", nargs="*")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--decoding", action="store_true", help="the shapes and sizes of decoding instead")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no shape after these")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print a finished file as Markdown")
    options = parser.parse_args()
    if options.tables:
        print(tables(json.loads(options.tables.read_text())))
        return
    if options.record:
        cases = RECORD
    elif options.shapes or options.formats or options.tokens or options.decoding:
        shapes = options.shapes or (DECODING if options.decoding else TRAINING)
        tokens = options.tokens or (DECODING_TOKENS if options.decoding else TOKENS)
        cases = bench_plan.chosen(
            tuple(shapes), tuple(options.formats or ("int4", "mxfp4")), tuple(tokens), options.decoding
        )
    else:
        cases = bench_plan.everything()
    run_cases(cases, options.out, options.seconds)


if __name__ == "__main__":
    main()
