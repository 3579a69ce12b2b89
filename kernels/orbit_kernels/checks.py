"""What frozen linears and experts refuse before anything runs.

Operands that do not fit each other often compute all the same: a scale with one column is broadcast, INT4's codes are
numbers as FP4's too, expert -1 is the last one. Only shapes, dtypes and devices are asked here, so nothing waits for a
GPU; what an id says is checked where the host knows it anyway. Left out: what only the kernels cannot take
(`grouped.unsupported`), and whether stored numbers are finite (`orbit_cli.quantization`).

Every sentence says what was given, why it cannot be, and what to pass. Shape letters: T tokens, k experts per token,
E experts, H hidden, I intermediate, N outputs, K inputs, b block size of a rotation, r LoRA rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orbit_kernels.decode import FORMATS, FP8_BLOCK, GROUP

if TYPE_CHECKING:
    from orbit_kernels.experts import ExpertAdapters, StackedAdapter

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
PACKED = dict.fromkeys(GROUP, (torch.uint8,)) | {"fp8": (torch.float8_e4m3fn,), "bf16": FLOATS}
SCALES = {"int4": FLOATS, "mxfp4": (torch.uint8,), "nvfp4": (torch.float8_e4m3fn,), "fp8": FLOATS}


def stored_misfit(
    packed: Tensor,
    scale: Tensor | None,
    fmt: str,
    global_scale: Tensor | None = None,
    *,
    experts: bool,
    parts: int = 1,
    prefix: str = "",
) -> str | None:
    """Why these are no weight [N, K], or [E, N, K] of `experts`, as `decode.dequantize` reads it; None if they are.

    `parts` matrices lie one after another along N, each with scale blocks of its own (FP8). `prefix` goes before the
    names of the arguments: "w13_".
    """
    if fmt not in FORMATS:
        return f"number format {fmt!r} cannot be decoded; use one of {', '.join(FORMATS)}"
    if packed.dim() != 2 + experts:
        wanted = f"[{'experts, ' if experts else ''}outputs, {'inputs / 2' if fmt in GROUP else 'inputs'}]"
        return f"{prefix}packed has shape {list(packed.shape)}; {fmt} weights are stored as {wanted}, pass that"
    if packed.dtype not in PACKED[fmt]:
        return f"{prefix}packed is {packed.dtype}, but {fmt} is stored as {_names(PACKED[fmt])}; pass its own fmt"
    *lead, rows, columns = packed.shape
    columns *= 2 if fmt in GROUP else 1
    if rows % parts:
        return f"{prefix}packed has {rows} rows, which are not {parts} equal parts; pass gate and up of one size"
    if fmt in GROUP and columns % GROUP[fmt]:
        return f"{prefix}packed has {columns} inputs, no multiple of {fmt}'s group of {GROUP[fmt]}; pad the weight"
    if fmt == "bf16":
        for name, given in (("scale", scale), ("global_scale", global_scale)):
            if given is not None:
                return f"{prefix}{name} is given, but bf16 weights have no scales; pass None, or the weight's own fmt"
        return None
    if scale is None:
        return f"{prefix}scale is None, but {fmt} weights are nothing without their scales; pass them"
    if scale.dtype not in SCALES[fmt]:
        return f"{prefix}scale is {scale.dtype}, but {fmt}'s scales are {_names(SCALES[fmt])}; pass those or its fmt"
    if fmt == "fp8":
        wanted = [*lead, parts * -(-(rows // parts) // FP8_BLOCK), -(-columns // FP8_BLOCK)]
        each = f"{FP8_BLOCK} x {FP8_BLOCK} weights" + (" of gate and of up" if parts == 2 else "")
    else:
        wanted, each = [*lead, rows, columns // GROUP[fmt]], f"{GROUP[fmt]} weights of a row"
    if list(scale.shape) != wanted:
        return (
            f"{prefix}scale has shape {list(scale.shape)}, but {fmt} weights of {rows} x {columns} have {wanted}, one "
            f"for {each}; pass the scales that were made with {prefix}packed"
        )
    return _global_misfit(global_scale, fmt, lead, prefix)


def _global_misfit(global_scale: Tensor | None, fmt: str, lead: list[int], prefix: str) -> str | None:
    count = lead[0] if lead else 1
    if fmt != "nvfp4":
        if global_scale is not None:
            return f"{prefix}global_scale is given, but only nvfp4 has one, not {fmt}; pass None, or fmt='nvfp4'"
        return None
    if global_scale is None:
        return f"{prefix}global_scale is None, but nvfp4's scales are divided by it; pass {count} of float32"
    fits = global_scale.numel() == count and (not lead or global_scale.shape[:1] == (count,))
    if global_scale.dtype not in FLOATS or not fits:
        found = f"{global_scale.dtype} {list(global_scale.shape)}"
        return f"{prefix}global_scale is {found}, but nvfp4 has one number for each matrix; pass {count} of float32"
    return None


def check_linear(
    x: Tensor, packed: Tensor, scale: Tensor | None, fmt: str, global_scale: Tensor | None, bias: Tensor | None
) -> None:
    """ValueError unless x [..., K], the weight [N, K] and bias [N] of `linear.frozen_linear` fit each other."""
    if misfit := stored_misfit(packed, scale, fmt, global_scale, experts=False):
        raise ValueError(misfit)
    outputs, inputs = packed.shape[0], packed.shape[1] * (2 if fmt in GROUP else 1)
    if x.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype}; a product is formed in the dtype of x, pass one of {_names(FLOATS)}")
    if x.dim() == 0 or x.shape[-1] != inputs:
        raise ValueError(f"x has shape {list(x.shape)}, but the weight has {inputs} inputs; pass [..., {inputs}]")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias has shape {list(bias.shape)}, but the weight has {outputs} outputs; pass [{outputs}]")
    others = {"packed": packed, "scale": scale, "global_scale": global_scale, "bias": bias}
    _check_devices(x, others)


def check_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w13: tuple[Tensor, Tensor | None, Tensor | None],
    w2: tuple[Tensor, Tensor | None, Tensor | None],
    fmt: str,
    adapter: ExpertAdapters | None,
) -> None:
    """ValueError unless the arguments of `experts.frozen_experts` fit each other; w13, w2: (packed, scale, global)."""
    for prefix, (packed, scale, shared), parts in (("w13_", w13, 2), ("w2_", w2, 1)):
        misfit = stored_misfit(packed, scale, fmt, shared, experts=True, parts=parts, prefix=prefix)
        if misfit:
            raise ValueError(misfit)
    per_byte = 2 if fmt in GROUP else 1
    experts, hidden, inter = w2[0].shape[0], w2[0].shape[1], w2[0].shape[2] * per_byte
    found = [*w13[0].shape[:2], w13[0].shape[2] * per_byte]
    if found != [experts, 2 * inter, hidden]:
        raise ValueError(f"w13 is {found} but w2 asks for {[experts, 2 * inter, hidden]}; they are of two layers")
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x has shape {list(x.shape)}, but w2 gives {hidden} hidden columns; pass [tokens, {hidden}]")
    if x.dtype not in FLOATS:
        raise ValueError(f"x is {x.dtype}; products are formed in the dtype of x, pass one of {_names(FLOATS)}")
    if expert_ids.shape != weights.shape or expert_ids.dim() != 2 or len(expert_ids) != len(x):
        raise ValueError(
            f"expert_ids {list(expert_ids.shape)} and weights {list(weights.shape)} must both be [{len(x)}, slots]"
        )
    if len(x) and not expert_ids.shape[1]:
        raise ValueError(f"expert_ids {list(expert_ids.shape)} routes no token anywhere; pass at least one slot")
    if expert_ids.dtype not in INTEGERS:
        raise ValueError(f"expert_ids are {expert_ids.dtype}, which number no experts; pass int64 or int32")
    if not weights.is_floating_point():
        raise ValueError(f"weights are {weights.dtype}, but the router's are fractions; pass floating point numbers")
    named = {"expert_ids": expert_ids, "weights": weights}
    named |= dict(zip(("w13_packed", "w13_scale", "w13_global_scale"), w13, strict=True))
    named |= dict(zip(("w2_packed", "w2_scale", "w2_global_scale"), w2, strict=True))
    if adapter is not None:
        for name, inputs, outputs in (("gate", hidden, inter), ("up", hidden, inter), ("down", inter, hidden)):
            stack = getattr(adapter, name)
            if stack is not None:
                named |= _checked_stack(f"adapter.{name}", stack, experts, inputs, outputs)
    _check_devices(x, named)


def check_range(lowest: int, highest: int, experts: int) -> None:
    """ValueError unless the lowest and the highest of all expert ids number experts of the layer."""
    if lowest < 0 or highest >= experts:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"expert_ids holds {wrong}, but the layer has experts 0 to {experts - 1}; pass ids of these, and leave out "
            "tokens of padding"
        )


def _checked_stack(where: str, stack: StackedAdapter, experts: int, inputs: int, outputs: int) -> dict[str, Tensor]:
    """The stack's tensors by name; ValueError unless they adapt `experts` projections of inputs x outputs."""
    turn, a, b = stack.rotation, stack.lora_a, stack.lora_b
    if turn is None and a is None and b is None:
        raise ValueError(f"{where} is empty; give it a rotation or LoRA, or pass {where}=None for a plain projection")
    if (a is None) != (b is None):
        given, missing = ("lora_b", "lora_a") if a is None else ("lora_a", "lora_b")
        raise ValueError(f"{where} has {given} without {missing}, but y += (x A^T) B^T needs both; pass both, or none")
    if turn is not None:
        shape = list(turn.shape)
        if len(shape) != 4 or shape[0] != experts or shape[2] != shape[3] or shape[1] * shape[2] != inputs:
            raise ValueError(
                f"{where}.rotation has shape {shape}, which does not turn all {inputs} inputs of {experts} experts; "
                f"pass [{experts}, {inputs} / b, b, b] with square blocks"
            )
    if a is not None:
        if a.dim() != 3 or a.shape[0] != experts or a.shape[2] != inputs or not a.shape[1]:
            raise ValueError(
                f"{where}.lora_a has shape {list(a.shape)}, but there are {experts} experts of {inputs} inputs; "
                f"pass [{experts}, rank, {inputs}]"
            )
        if list(b.shape) != [experts, outputs, a.shape[1]]:
            raise ValueError(
                f"{where}.lora_b has shape {list(b.shape)}, but {experts} experts of {outputs} outputs and the rank of "
                f"lora_a need {[experts, outputs, a.shape[1]]}; pass that"
            )
    tensors = {f"{where}.rotation": turn, f"{where}.lora_a": a, f"{where}.lora_b": b}
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}, which no gradient trains; pass one of {_names(FLOATS)}")
    return found


def _check_devices(x: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}; move one of them")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
