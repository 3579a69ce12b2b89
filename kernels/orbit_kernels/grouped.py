"""Grouped products with frozen packed experts: y = x W_e^T and its input gradient dx = dy W_e, from the stored bytes.

No decoded copy of a weight exists outside registers, and both directions read the same bytes. The weights are the
left, register operand of the matrix unit and tokens the right one in shared memory, so that a decoded weight never
passes through shared memory and a tile may hold as few as 16 tokens. One accumulator runs over the reduction in steps
of 16, ascending: the result of a row does not depend on tile size, batch or position. Nothing is split or added
atomically. Left out: weight gradients (the base is frozen) and what happens between the products (experts.py).

Shape letters: R rows sorted by expert, E experts, N outputs, K inputs, P parts of N (gate, up), G scale groups along K.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from orbit_kernels.checks import stored_misfit
from orbit_kernels.decode import GROUP, dequantize
from orbit_kernels.grouped_tiles import forward_kernel, gradient_kernel
from orbit_kernels.routing import Tiles, row_tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPUTE = torch.float32 if INTERPRETED else torch.bfloat16  # of activations


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedExperts:
    """One stacked projection [E, N, K] as stored; fields as in `orbit_kernels.decode.dequantize`, after a leading E."""

    packed: torch.Tensor
    scale: torch.Tensor | None
    fmt: str
    global_scale: torch.Tensor | None = None  # [E] or [E, 1]
    parts: int = 1  # matrices along N: 2 for gate and up, each with scale blocks of its own (FP8)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, outputs, columns = self.packed.shape
        return experts, outputs, columns * (2 if self.fmt in GROUP else 1)

    def part(self, number: int) -> PackedExperts:
        """Views of one of the parts."""
        scale = None if self.scale is None else self.scale.chunk(self.parts, 1)[number]
        packed = self.packed.chunk(self.parts, 1)[number]
        return PackedExperts(packed=packed, scale=scale, fmt=self.fmt, global_scale=self.global_scale)

    @property
    def in_fragment_order(self) -> bool:
        """Whether `grouped_forward` wants the columns of x in the order of `fragments.fragment_order`."""
        return self.fmt in GROUP


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """What a product adds to its sum before the one rounding: a narrow matrix per row times a low-rank one per group.

    Forward: rows [R, P r] holds for part p of N columns p r to (p + 1) r, matrices[p] is [groups, N / P, r].
    Gradient: dx += sum over p of rows[:, p r : (p + 1) r] matrices[p], with matrices[p] [groups, r, K].
    r is 16, 32, 64 or 128: pad with zeros. Groups are experts, or experts x versions (`slots` of grouped_forward).
    """

    rows: torch.Tensor
    matrices: tuple[torch.Tensor, ...]

    @property
    def rank(self) -> int:
        return self.rows.shape[1] // len(self.matrices)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile: rows of weights and steps of the reduction, warps and pipeline stages; blocks per multiprocessor."""

    block: int
    step: int
    warps: int
    stages: int
    blocks_per_sm: int = 1
    tails: int = 2  # sizes of an expert's last tile besides the full one: half, quarter


FEW = 32
"""Up to tiles of so many rows hopper_few.py multiplies; above hopper_forward.py."""
# H200, Kimi-K2.6 expert shapes, INT4: the fastest of the sweep in docs/benchmarks.md, by tokens of a tile.
FORWARD_SHAPES = {
    16: Shape(128, 128, 8, 3, 2),
    32: Shape(128, 128, 8, 3, 2),
    64: Shape(128, 128, 8, 3, 2),
    128: Shape(128, 128, 8, 3, 1),
}
GRADIENT_SHAPES = {
    16: Shape(256, 64, 8, 3, 2),
    32: Shape(256, 64, 8, 3, 2),
    64: Shape(256, 64, 8, 3, 2),
    128: Shape(256, 64, 8, 3, 1),
}


def grouped_forward(
    x: torch.Tensor,
    weight: PackedExperts,
    offsets: torch.Tensor,
    *,
    split: bool = False,
    low: LowRank | None = None,
    slots: int = 1,
    tile: int | None = None,
    tiles: Tiles | None = None,
    shape: Shape | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [R, N] with y[r] = x[r] W_e^T for the rows r of expert e, offsets[e] <= r < offsets[e + 1].

    x [R, K], for 4-bit formats with its columns in `fragment_order`; with `split` x is [P, R, K] and part p of N reads
    x[p]. offsets int32 [E + 1]. Rows from offsets[E] on are not written. `low` is added to the sum; with `slots` its
    matrices are [E slots, ...] and offsets [E slots + 1], group expert * slots + slot. `tiles` are those of offsets,
    if the caller has them, of `forward_tile` rows. `tile` (16, 32, 64, 128 rows; 8 on Hopper) and `shape`
    are for tuning: the numbers do not depend on them. Raises ValueError for what `unsupported` names.
    """
    rows = _check(x, weight, offsets, split, weight.shape[2], low, slots)
    experts, outputs, inputs = weight.shape
    out = x.new_empty(rows, outputs) if out is None else out
    if rows == 0:
        return out
    tiles = tiles or row_tiles(offsets, rows, tile or forward_tile(weight, rows))
    tile = tiles.size
    if shape is None and tile <= FEW and _suits_hopper(weight, 64):
        from orbit_kernels import hopper_few

        hopper_few.forward(x, weight, out, tiles, offsets, rows if split else 0, multiprocessors(), low, slots)
        return out
    if shape is None and _suits_hopper(weight, 256, 512):
        from orbit_kernels import hopper_forward

        hopper_forward.forward(x, weight, out, tiles, offsets, rows if split else 0, multiprocessors(), low, slots)
        return out
    shape = shape or FORWARD_SHAPES[tile]
    block = min(shape.block, max(16, triton.next_power_of_2(outputs // weight.parts)))
    step = min(shape.step, max(32, triton.next_power_of_2(inputs)))
    tails = min(shape.tails, (tile // 16).bit_length() - 1)
    parts = weight.parts
    blocks = parts * triton.cdiv(outputs // parts, block)
    forward_kernel[_grid(shape, rows, tile, experts * slots, blocks)](
        *_activations(x, inputs, tile, tails, step),
        _stored(weight, torch.int32, block, step),
        _bytes(weight.scale), _factor(weight), *_narrow(low), out, tiles.expert, tiles.start, tiles.count, offsets,
        inputs, outputs // parts, rows if split else 0, slots,
        PARTS=parts, BM=tile, BLOCK=block, STEP=step, FMT=weight.fmt, ASM=not INTERPRETED,
        EVEN=inputs % step == 0 and (outputs // parts) % block == 0,
        TAILS=tails, RANK=0 if low is None else low.rank,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def grouped_input_gradient(
    dy: torch.Tensor,
    weight: PackedExperts,
    offsets: torch.Tensor,
    *,
    split: bool = False,
    low: LowRank | None = None,
    tile: int | None = None,
    tiles: Tiles | None = None,
    shape: Shape | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """dx [R, K] with dx[r] = dy[r] W_e, columns in their natural order; with `split` [P, R, K], one per part of N.

    dy [R, N]; `low` is added to dx and needs one dx for all parts; the rest as in `grouped_forward`.
    """
    rows = _check(dy, weight, offsets, False, weight.shape[1], low)
    assert low is None or not split
    experts, outputs, inputs = weight.shape
    splits = weight.parts if split else 1
    if out is None:
        out = dy.new_empty((splits, rows, inputs) if split else (rows, inputs))
    if rows == 0:
        return out
    tiles = tiles or row_tiles(offsets, rows, tile or token_tile(rows, experts))
    tile = tiles.size
    if shape is None and _suits_hopper(weight, 64, 512):
        from orbit_kernels import hopper_gradient

        hopper_gradient.gradient(dy, weight, out, tiles, offsets, split, multiprocessors(), low)
        return out
    shape = shape or GRADIENT_SHAPES[tile]
    block = min(shape.block, max(32, triton.next_power_of_2(inputs)))
    step = min(shape.step, max(16, triton.next_power_of_2(outputs // weight.parts)))
    tails = min(shape.tails, (tile // 16).bit_length() - 1)
    gradient_kernel[_grid(shape, rows, tile, experts, splits * triton.cdiv(inputs, block))](
        *_activations(dy, outputs, tile, tails, step),
        _stored(weight, torch.int16, step, block),
        _bytes(weight.scale), _factor(weight), *_narrow(low), out, tiles.expert, tiles.start, tiles.count, offsets,
        inputs, outputs // weight.parts, rows,
        PARTS=weight.parts, SPLITS=splits, BM=tile, BLOCK=block, STEP=step, FMT=weight.fmt, ASM=not INTERPRETED,
        EVEN=inputs % block == 0 and (outputs // weight.parts) % step == 0,
        TAILS=tails, RANK=0 if low is None else low.rank,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def forward_reference(
    x: torch.Tensor, weight: PackedExperts, offsets: torch.Tensor, split: bool = False
) -> torch.Tensor:
    """`grouped_forward` in PyTorch for x in its natural column order; the dtype of x is the compute dtype."""
    pieces = []
    for expert, (first, last) in enumerate(_bounds(offsets)):
        own = x[..., first:last, :]
        decoded = decoded_expert(weight, expert, x.dtype).unflatten(0, (weight.parts, -1))  # [P, N/P, K]
        pieces.append(torch.cat([(own[p] if split else own) @ decoded[p].T for p in range(weight.parts)], -1))
    return torch.cat(pieces)


def gradient_reference(
    dy: torch.Tensor, weight: PackedExperts, offsets: torch.Tensor, split: bool = False
) -> torch.Tensor:
    """`grouped_input_gradient` in PyTorch."""
    pieces = []
    for expert, (first, last) in enumerate(_bounds(offsets)):
        decoded = decoded_expert(weight, expert, dy.dtype)
        own = dy[first:last]
        if split:
            halves = zip(own.chunk(weight.parts, -1), decoded.chunk(weight.parts, 0), strict=True)
            pieces.append(torch.stack([part @ matrix for part, matrix in halves]))
        else:
            pieces.append(own @ decoded)
    return torch.cat(pieces, -2)


def decoded_expert(weight: PackedExperts, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] of one expert; parts are decoded one by one since FP8 blocks do not cross them."""
    scale = [None] * weight.parts if weight.scale is None else weight.scale[expert].chunk(weight.parts)
    shared = None if weight.global_scale is None else weight.global_scale[expert]
    matrices = zip(weight.packed[expert].chunk(weight.parts), scale, strict=True)
    return torch.cat([dequantize(packed, own, weight.fmt, dtype, shared) for packed, own in matrices])


def unsupported(weight: PackedExperts) -> str | None:
    """Why the kernels cannot take this weight, or None: callers fall back, or show it to a person."""
    misfit = stored_misfit(
        weight.packed, weight.scale, weight.fmt, weight.global_scale, experts=True, parts=weight.parts
    )
    if misfit:
        return misfit
    if not (weight.packed.is_cuda or INTERPRETED):
        return f"the kernels need a CUDA device, the weights are on {weight.packed.device}; move them to one"
    _, outputs, inputs = weight.shape
    if inputs % 32 or (outputs // weight.parts) % 32:
        return f"a weight of {outputs} x {inputs} does not split into 32-groups; pad both sizes to multiples of 32"
    if weight.fmt == "int4" and weight.scale.dtype != torch.bfloat16:
        return f"INT4 scales are {weight.scale.dtype}; the kernels read bfloat16, convert them"
    if weight.fmt == "bf16" and weight.packed.dtype != torch.bfloat16:
        return f"unquantised weights are {weight.packed.dtype}; the kernels read bfloat16, convert them"
    if weight.fmt == "fp8" and weight.parts > 1 and (outputs // weight.parts) % 64:
        return f"FP8 gate and up of {outputs // weight.parts} rows share a step of 64 rows; pad to a multiple of 64"
    loose = [t for t in (weight.packed, weight.scale) if t is not None and not t.is_contiguous()]
    if loose or weight.packed.data_ptr() % 16:
        return "packed weights and scales must be contiguous, and the weights 16-byte aligned; call .contiguous()"
    return None


def token_tile(rows: int, experts: int) -> int:
    """Rows of a full tile from what the host knows, the mean rows of an expert.

    A small tile decodes weights too often, a large one multiplies padding. The bounds are where the times cross on an
    H200 for Kimi-K2.6's experts in INT4: at a mean of 21 rows tiles of 16, 32, 64 take 3.5, 2.4, 2.9 ms, at 85 tiles of
    64 and 128 take 6.4 and 5.0 ms.
    """
    mean = rows / experts
    return 16 if mean <= 10 else 32 if mean <= 27 else 64 if mean <= 58 else 128


def forward_tile(weight: PackedExperts, rows: int) -> int:
    """Rows of a tile of `grouped_forward`: 8 where more would mostly be padding."""
    few = rows <= 4 * weight.shape[0] and _suits_hopper(weight, 64)
    return 8 if few else token_tile(rows, weight.shape[0])


def _suits_hopper(weight: PackedExperts, multiple: int, columns: int = 256) -> bool:
    """Whether a Gluon kernel takes it: whole blocks of `multiple` rows and `columns` columns for MXFP4, 256 for INT4.

    The columns are those whose scales the copy engine can address, or a stage.
    """
    if weight.fmt not in ("int4", "mxfp4"):
        return False
    fits = weight.shape[2] % (columns if weight.fmt == "mxfp4" else 256) == 0
    fits = fits and (weight.shape[1] // weight.parts) % multiple == 0
    return fits and weight.packed.is_cuda and torch.cuda.get_device_capability(weight.packed.device) == (9, 0)


def _check(
    rows_in: torch.Tensor,
    weight: PackedExperts,
    offsets: torch.Tensor,
    split: bool,
    columns: int,
    low: LowRank | None,
    slots: int = 1,
) -> int:
    """The number of rows; ValueError unless tensors fit each other."""
    reason = unsupported(weight)
    if reason:
        raise ValueError(reason)
    lead = (weight.parts,) if split else ()
    if rows_in.dim() != 2 + len(lead) or rows_in.shape[:-2] != lead or rows_in.shape[-1] != columns:
        expected = [*lead, "rows", columns]
        raise ValueError(f"activations have shape {list(rows_in.shape)}, the weight needs {expected}")
    if not rows_in.is_contiguous() or rows_in.data_ptr() % 16:
        raise ValueError("activations must be contiguous and 16-byte aligned; call .contiguous()")
    if rows_in.dtype != COMPUTE:
        raise ValueError(f"activations are {rows_in.dtype}; the kernels multiply {COMPUTE}, convert them")
    groups = weight.shape[0] * slots
    if offsets.dtype != torch.int32 or offsets.shape != (groups + 1,):
        raise ValueError(f"offsets must be int32 [{groups + 1}], not {offsets.dtype} {list(offsets.shape)}")
    if low is not None:
        assert low.rank in (16, 32, 64, 128) and low.rows.shape == (rows_in.shape[-2], weight.parts * low.rank)
        assert low.rows.dtype == rows_in.dtype and low.rows.is_contiguous()
        assert all(len(own) == groups and own.is_contiguous() and own.dtype == COMPUTE for own in low.matrices)
    devices = {t.device for t in (rows_in, weight.packed, weight.scale, offsets) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"tensors lie on {', '.join(sorted(map(str, devices)))}; move them to one device")
    return rows_in.shape[-2]


def _activations(x: torch.Tensor, columns: int, tile: int, tails: int, step: int) -> list[TensorDescriptor]:
    """Descriptors of the same matrix for full, half and quarter tiles; those beyond `tails` are never read."""
    flat = x.view(-1, columns)
    return [TensorDescriptor.from_tensor(flat, [tile >> (level if level <= tails else 0), step]) for level in range(3)]


def _stored(weight: PackedExperts, unit: torch.dtype, rows: int, columns: int) -> TensorDescriptor:
    """The stored matrix as [E N, ...]: codes in units of int32 (eight, forward) or int16 (four, gradient)."""
    packed = _bytes(weight.packed.view(-1, weight.packed.shape[-1]))
    if weight.fmt in GROUP:
        packed, columns = packed.view(unit), columns // (2 * unit.itemsize)
    return TensorDescriptor.from_tensor(packed, [rows, columns])


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 numbers as uint8: the kernels say themselves what they mean, and the interpreter cannot load FP8."""
    return tensor.view(torch.uint8) if tensor is not None and tensor.dtype == torch.float8_e4m3fn else tensor


def _factor(weight: PackedExperts) -> torch.Tensor | None:
    """float32 [E]: what NVFP4 products are multiplied by; compressed-tensors stores the divisor."""
    return None if weight.global_scale is None else weight.global_scale.float().reciprocal().reshape(-1)


def _narrow(low: LowRank | None) -> tuple[torch.Tensor | None, ...]:
    return (None, None, None) if low is None else (low.rows, low.matrices[0], low.matrices[-1])


def _grid(shape: Shape, rows: int, tile: int, experts: int, blocks: int) -> tuple[int]:
    """Programs that stay: enough for every multiprocessor, never more than there can be tiles."""
    return (min(multiprocessors() * shape.blocks_per_sm, (rows // tile + min(experts, rows)) * blocks),)


def _bounds(offsets: torch.Tensor) -> list[tuple[int, int]]:
    bounds = offsets.tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))


@functools.cache
def multiprocessors() -> int:
    """Of the current device; a few under the interpreter."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(0).multi_processor_count
