"""Compile the grouped kernels for sm_90a without a GPU and fail on what makes them slow or wrong there.

    python scripts/check_kernels_sm90a.py [--formats int4 mxfp4] [--tiles 16 128]

Spilled registers; a serialised matrix unit, which ptxas reports only with -v (C7510 to C7515); and registers of a left
operand that are written again while the matrix unit may still read them. The last is a race that neither compiler nor
sanitizer reports, and that Triton 3.6 makes by itself in a pipelined loop (see grouped_tiles.py).
The public functions run on CPU tensors over a driver that only names its target, so that what is compiled is what a
GPU would be given.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from orbit_kernels import (  # noqa: E402
    grouped,
    hopper_few,
    hopper_forward,
    hopper_gradient,
    lora_sweep,
    permute,
    rotation,
    routing,
    swiglu,
)
from orbit_kernels.expert_layer import PROJECTIONS, expert_layer, serve_expert_layer  # noqa: E402
from orbit_kernels.experts import ExpertAdapters, StackedAdapter  # noqa: E402
from orbit_kernels.routing import row_tiles  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROWS, OUTPUTS, INPUTS = 128, 512, 1024
SHARED_MEMORY = 232_448  # bytes that a block may have


class Sm90a:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> list:
    """Make every launch a compilation; returns the list that the compiled kernels are appended to."""
    driver.set_active(Sm90a())
    compiled = []
    run = JITFunction.run

    def warm(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = warm
    grouped.multiprocessors = lambda: 132
    grouped.unsupported = lambda _: None  # the weights lie on a CPU
    for module in (hopper_few, permute, routing, swiglu):
        module.chained = lambda: {"CHAINED": True, "launch_pdl": True}
    routing.RANKED_ROWS = 0  # PyTorch routes, since what no kernel wrote would be read as places of rows
    return compiled


def ptxas_report(ptx: str) -> dict[str, int | bool]:
    """Registers, spilled bytes and whether wgmma is serialised, from the assembler's own words."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [TOOLS / "ptxas", "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
            check=True,
        )
    text = done.stderr + done.stdout
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", text))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", text))),
        "serialised": "(C75" in text,
    }


def loops(cubin: bytes) -> list[list[str]]:
    """Instructions of every innermost loop that multiplies, from the disassembly."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", text, re.MULTILINE)
    code = [(int(address, 16), instruction.strip()) for address, instruction in found]
    index = {address: position for position, (address, _) in enumerate(code)}
    spans = []
    for position, (address, instruction) in enumerate(code):
        target = re.search(r"BRA\S* (?:`\()?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < address and int(target[1], 16) in index:
            start = index[int(target[1], 16)]
            if any("HGMMA" in line for _, line in code[start : position + 1]):
                spans.append((start, position + 1))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[line for _, line in code[start:end]] for start, end in inner]


def written(instruction: str) -> set[int]:
    """Registers that an instruction writes; stores, branches and barriers write none."""
    plain = re.sub(r"^@!?U?P\d+\s+", "", instruction)
    name, _, rest = plain.partition(" ")
    if name.startswith(("ST", "BRA", "BAR", "SYNCS", "UTMA", "HGMMA", "WARPGROUP", "ISETP", "FSETP", "R2UR", "MEMBAR")):
        return set()
    first = re.match(r"\s*(?:P\d+,\s*)?R(\d+)", rest)
    wide = re.search(r"\.(?:M|MT)\d+\.(\d)$", name) if "LDSM" in name else None
    count = int(wide[1]) if wide else 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return set(range(int(first[1]), int(first[1]) + count)) if first else set()


def ends_group(line: str) -> bool:
    """Whether an instruction is the last product of those that are waited for together."""
    return "HGMMA" in line and "gsb0" in line


def reused(loop: list[str]) -> list[str]:
    """Instructions that overwrite a left operand before the wait that covers its product."""
    found = []
    for position, line in enumerate(loop):
        product = re.search(r"HGMMA\S* R\d+, R(\d+),", line)
        if product is None:
            continue
        operand = set(range(int(product[1]), int(product[1]) + 4))
        later = 0 if ends_group(line) else -1  # groups of products that were closed after this one's own
        for step in range(1, len(loop)):
            other = loop[(position + step) % len(loop)]
            later += ends_group(other)
            wait = re.search(r"DEPBAR.LE gsb0, 0x([0-9a-f]+)", other)
            if wait and int(wait[1], 16) <= later:
                break
            if written(other) & operand:
                found.append(other)
                break
    return found


def example(fmt: str, outputs: int, inputs: int, parts: int) -> grouped.PackedExperts:
    """Two experts of a shape that needs no masks, as nearly all real ones."""
    experts = 2
    if fmt == "bf16":
        return grouped.PackedExperts(
            packed=torch.zeros(experts, outputs, inputs, dtype=torch.bfloat16), scale=None, fmt=fmt
        )
    if fmt == "fp8":
        packed = torch.zeros(experts, outputs, inputs).to(torch.float8_e4m3fn)
        return grouped.PackedExperts(
            packed=packed, scale=torch.ones(experts, outputs // 128, inputs // 128), fmt=fmt, parts=parts
        )
    dtype = {"int4": torch.bfloat16, "mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}[fmt]
    return grouped.PackedExperts(
        packed=torch.zeros(experts, outputs, inputs // 2, dtype=torch.uint8),
        scale=torch.zeros(experts, outputs, inputs // grouped.GROUP[fmt]).to(dtype),
        fmt=fmt,
        global_scale=torch.ones(experts) if fmt == "nvfp4" else None,
        parts=parts,
    )


def calls(fmt: str, tile: int):
    """(name, function that launches one kernel) for all kernels of a format."""
    weight = example(fmt, OUTPUTS, INPUTS, 2)
    offsets = torch.tensor([0, ROWS // 2, ROWS], dtype=torch.int32)
    x, dy = (torch.zeros(ROWS, columns, dtype=torch.bfloat16) for columns in (INPUTS, OUTPUTS))
    parts = weight.parts
    narrow = torch.zeros(ROWS, 32 * parts, dtype=torch.bfloat16)
    matrices = [torch.zeros(2, *size, dtype=torch.bfloat16) for size in ((OUTPUTS // parts, 32), (32, INPUTS))]
    lows = [grouped.LowRank(rows=narrow, matrices=(own,) * parts) for own in matrices]
    if fmt in ("int4", "mxfp4") and tile <= grouped.FEW:
        tiles = row_tiles(offsets, ROWS, tile)
        for low, name in ((None, ""), (lows[0], " + low")):
            for block in (hopper_few.SHORT, hopper_few.TALL):
                yield (
                    f"few, {block.rows} rows{name}",
                    lambda own=(low, 1, block): hopper_few.forward(x, weight, dy, tiles, offsets, 0, 132, *own),
                )
    if tile < 16:
        return
    yield "forward", lambda: grouped.grouped_forward(x, weight, offsets, tile=tile)
    yield "gradient", lambda: grouped.grouped_input_gradient(dy, weight, offsets, tile=tile)
    yield "forward + low", lambda: grouped.grouped_forward(x, weight, offsets, tile=tile, low=lows[0])
    yield "gradient + low", lambda: grouped.grouped_input_gradient(dy, weight, offsets, tile=tile, low=lows[1])
    if fmt in ("int4", "mxfp4"):
        tiles = row_tiles(offsets, ROWS, tile)
        for low, name in zip((None, *lows), ("", " + low"), strict=False):
            yield (
                f"hopper forward{name}",
                lambda own=low: hopper_forward.forward(x, weight, dy, tiles, offsets, 0, 132, own),
            )
        for low, name in zip((None, lows[1]), ("", " + low"), strict=True):
            yield (
                f"hopper gradient{name}",
                lambda own=low: hopper_gradient.gradient(dy, weight, x, tiles, offsets, False, 132, own),
            )


def layer_calls():
    """(name, function that launches the kernels around the products) for every adapter, forward and backward."""
    w13, w2 = example("int4", 2 * 512, INPUTS, 2), example("int4", INPUTS, 512, 1)
    ids, weights = torch.zeros(ROWS, 1, dtype=torch.long), torch.ones(ROWS, 1)

    def stack(turn: int, rank: int, slope: torch.dtype, inputs: int, outputs: int) -> StackedAdapter:
        def leaf(*shape: int) -> torch.Tensor | None:
            if not all(shape):
                return None
            held = torch.zeros(2, *shape, dtype=torch.bfloat16, requires_grad=True)
            held.grad_dtype = slope
            return held

        blocks = leaf(inputs // turn, turn, turn) if turn else None
        return StackedAdapter(rotation=blocks, lora_a=leaf(rank, inputs), lora_b=leaf(outputs, rank))

    def both_passes(turn: int, rank: int, slope: torch.dtype) -> None:
        stacks = [stack(turn, rank, slope, *size) for size in ((INPUTS, 512), (INPUTS, 512), (512, INPUTS))]
        found = ExpertAdapters(**dict(zip(PROJECTIONS, stacks, strict=True)))
        x = torch.zeros(ROWS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
        expert_layer(x, ids, weights, w13, w2, found).sum().backward()

    for tokens in (1, 16, ROWS):
        x = torch.zeros(tokens, INPUTS, dtype=torch.bfloat16)
        arguments = x, ids[:tokens].int(), weights[:tokens], w13, w2
        yield f"served, {tokens}", lambda arguments=arguments: serve_expert_layer(*arguments)
    for crowded in (False, True):
        rotation._crowded = lambda _, crowded=crowded: crowded
        lora_sweep.MANY = 0 if crowded else ROWS
        for turn, rank in ((0, 0), (16, 0), (32, 0), (64, 0), (128, 0), (0, 16), (0, 32), (0, 64), (0, 128), (32, 16)):
            for slope in (torch.bfloat16, torch.float32):  # a trainer's gradients are float32
                arguments = turn, rank, slope
                yield f"block {turn} rank {rank}", lambda arguments=arguments: both_passes(*arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["int4", "mxfp4", "nvfp4", "fp8", "bf16"])
    parser.add_argument("--tiles", nargs="+", type=int, default=[8, 16, 32, 128])
    options = parser.parse_args()
    compiled = compile_only()
    failures = 0
    for fmt in options.formats:
        for tile in options.tiles:
            for name, call in calls(fmt, tile):
                call()
                failures += not passes(compiled[-1], f"{fmt:6}{name:22} tile {tile:4}")
    seen = set()
    for name, call in layer_calls():
        del compiled[:]
        call()
        for kernel in compiled:
            if kernel.hash not in seen and kernel.name not in ("forward_kernel", "gradient_kernel"):
                seen.add(kernel.hash)
                failures += not passes(kernel, f"{name:20} {kernel.name:16}")
    return int(failures > 0)


def passes(kernel, name: str) -> bool:
    """Whether a compiled kernel has none of the faults, printed with its figures."""
    report = ptxas_report(kernel.asm["ptx"])
    report["reused"] = sum(len(reused(loop)) for loop in loops(kernel.asm["cubin"]))
    report["shared"] = kernel.metadata.shared
    bad = report["shared"] > SHARED_MEMORY or report["spill_bytes"] > 0 or report["serialised"] or report["reused"] > 0
    print(f"{'FAIL' if bad else 'ok':5}{name} {report}", flush=True)
    return not bad


if __name__ == "__main__":
    sys.exit(main())
