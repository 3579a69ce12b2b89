"""Compile the grouped kernels for sm_90a without a GPU and fail if ptxas spills or serialises the matrix unit.

    python scripts/check_kernels_sm90a.py [--formats int4 mxfp4] [--tiles 16 32 64 128] [--processes 2]

The public functions run on CPU tensors over a driver that only names its target, so that what is compiled is what a
GPU would be given. ptxas reports serialised wgmma only with -v (C7510 to C7515): the kernel would be right and slow.
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
from orbit_kernels import grouped  # noqa: E402

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


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
    return compiled


def ptxas_report(ptx: str) -> dict[str, int | bool]:
    """Registers, spilled bytes and whether wgmma is serialised, from the assembler's own words."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [PTXAS, "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))],
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["int4", "mxfp4", "nvfp4", "fp8", "bf16"])
    parser.add_argument("--tiles", nargs="+", type=int, default=[16, 32, 64, 128])
    options = parser.parse_args()
    compiled = compile_only()
    failed = False
    for fmt in options.formats:
        weight = example(fmt, 512, 1024, 2)
        offsets = torch.tensor([0, 64, 128], dtype=torch.int32)
        for tile in options.tiles:
            for name, function, columns in (
                ("forward", grouped.grouped_forward, 1024),
                ("gradient", grouped.grouped_input_gradient, 512),
            ):
                compiled.clear()
                function(torch.zeros(128, columns, dtype=torch.bfloat16), weight, offsets, tile=tile)
                kernel = compiled[-1]
                report = ptxas_report(kernel.asm["ptx"])
                bad = report["spill_bytes"] > 0 or report["serialised"]
                failed |= bad
                shared = kernel.metadata.shared
                print(
                    f"{'FAIL' if bad else 'ok':5}{fmt:6}{name:9} tile {tile:4} shared {shared:7} {report}", flush=True
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
