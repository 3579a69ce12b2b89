"""SGLang's fused experts on our weights, rows and routing, for bench.py: its Triton W4A16 kernel and Marlin.

Whole MLPs as the engine calls them: alignment of the routing, both products, SwiGLU, weighted sum. Triton reads the
layout that we store; it runs with the block sizes that SGLang picks for the shape (no tuned file of 0.5.17 names an
H200 and INT4). Marlin gets its own copy, repacked as SGLang does at loading. Written for SGLang 0.5.17; Marlin is
compiled on first use, four minutes.

Shape letters: E experts, N outputs, K inputs, G scale groups along K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata

import torch
from torch import Tensor

from orbit_kernels.bench_paths import Batch, Problem
from orbit_kernels.grouped import PackedExperts

GROUP_SIZE = 32


def version() -> str | None:
    """Of the installed SGLang."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def prepare() -> str | None:
    """Publish the configuration that SGLang's layers ask for; the reason if they cannot be used here."""
    if version() is None:
        return "SGLang is not installed"
    try:
        from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe  # noqa: F401
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import ServerArgs

        publish(ServerArgs(model_path="dummy"), role="scheduler")
    except Exception as error:  # its import runs compilers and loads drivers: whatever stops it, our rows stand
        return f"SGLang {version()} does not import: {type(error).__name__}: {str(error).splitlines()[0]}"
    fused_moe.get_tp_group = lambda: None  # asked for on every call, used only with symmetric memory
    return None


def peers(problem: Problem) -> dict[str, Callable[[Batch], Tensor]]:
    """{path: y [T, H] of a batch}; SGLang's Triton kernel reads no E2M1 codes, and other formats have no INT4 peer."""
    found = {"int4": (_triton, _marlin), "mxfp4": (_marlin,)}.get(problem.w13.fmt, ())
    return {make.__name__.replace("_", "sglang "): make(problem) for make in found}


def _triton(problem: Problem) -> Callable[[Batch], Tensor]:
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl

    w13, w2 = problem.w13, problem.w2

    def run(batch: Batch) -> Tensor:
        return fused_experts_impl(
            batch.x, w13.packed, w2.packed, batch.weights, batch.ids, use_int4_w4a16=True, w1_scale=w13.scale,
            w2_scale=w2.scale, block_shape=[0, GROUP_SIZE], filter_expert=False,
        )  # fmt: skip

    return run


def _marlin(problem: Problem) -> Callable[[Batch], Tensor]:
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

    (w13, scale13), (w2, scale2) = _repacked(problem.w13), _repacked(problem.w2)
    workspace = marlin_make_workspace(w13.device, 4)

    def run(batch: Batch) -> Tensor:
        return fused_marlin_moe(
            batch.x, w13, w2, scale13, scale2, batch.x, batch.weights, batch.ids, workspace=workspace, num_bits=4
        )  # the sixth argument is the router's logits, of which only the length is read

    return run


def _repacked(weight: PackedExperts) -> tuple[Tensor, Tensor]:
    """Marlin's tiles int32 [E, K/16, 2 N] and scales [E, G, N]."""
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack

    _, outputs, inputs = weight.shape
    order = torch.empty(0, dtype=torch.int32, device=weight.packed.device)
    words = weight.packed.view(torch.int32)  # [E, N, K/8]
    tiles = torch.stack([gptq_marlin_repack(own.T.contiguous(), order, inputs, outputs, 4) for own in words])
    permuted = functools.partial(_permuted_scale, fmt=weight.fmt, outputs=outputs, inputs=inputs)
    return tiles, torch.stack([permuted(own) for own in weight.scale])


def _permuted_scale(scale: Tensor, fmt: str, outputs: int, inputs: int) -> Tensor:
    """[G, N] of one expert, BF16 for INT4 and E8M0 for MXFP4."""
    from sglang.srt.layers.quantization.marlin_utils import marlin_permute_scales
    from sglang.srt.layers.quantization.marlin_utils_fp4 import mxfp4_marlin_process_scales

    if fmt == "int4":
        return marlin_permute_scales(scale.T.contiguous(), inputs, outputs, GROUP_SIZE)
    numbers = scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return mxfp4_marlin_process_scales(
        marlin_permute_scales(numbers.T.contiguous(), inputs, outputs, GROUP_SIZE), torch.bfloat16
    )
