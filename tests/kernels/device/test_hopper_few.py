"""The Gluon kernel for few rows against the one for many, bit for bit, on ragged groups; it needs a Hopper GPU."""

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED, relative_error, tolerance, values
from test_grouped import in_order, offsets_of, per_expert, poisoned, random_experts

from orbit_kernels.grouped import LowRank
from orbit_kernels.routing import row_tiles

if not INTERPRETED and torch.cuda.get_device_capability() == (9, 0):
    from orbit_kernels import hopper_few, hopper_forward

    COUNTS = [0, 1, 7, 8, 9, 0, 31, 33, 2]
    BLOCKS = (hopper_few.SHORT, hopper_few.TALL)
    TILES = (8, 16, 32)

    @pytest.mark.parametrize("fmt", ["int4", "mxfp4"])
    @pytest.mark.parametrize("outputs, inputs, parts", [(512, 1024, 1), (1024, 512, 2)])
    @pytest.mark.parametrize("rank", [0, 32])
    def test_the_same_bits_as_the_kernel_for_many_rows(fmt, outputs, inputs, parts, rank):
        """Parts with rows of their own, low ranks, versions of an expert, programs of one and of many blocks."""
        slots = 3 if rank else 1
        weight, _ = random_experts(fmt, len(COUNTS) // slots, outputs, inputs, parts)
        rows, offsets = sum(COUNTS), offsets_of(COUNTS)
        x = in_order(values(parts, rows, inputs), weight)
        low = None
        if rank:
            matrices = tuple(values(len(COUNTS), outputs // parts, rank).mul_(inputs**0.5) for _ in range(parts))
            low = LowRank(rows=values(rows, parts * rank), matrices=matrices)
        wanted = torch.empty(rows, outputs, dtype=x.dtype, device=DEVICE)
        tiles = row_tiles(offsets, rows, 16)
        hopper_forward.forward(x, weight, wanted, tiles, offsets, rows, 132, low, slots)
        for block in BLOCKS:
            for size in TILES:
                for multiprocessors in (1, 132):
                    y = poisoned(rows, outputs)
                    tiles = row_tiles(offsets, rows, size)
                    hopper_few.forward(x, weight, y[:-1], tiles, offsets, rows, multiprocessors, low, slots, block)
                    assert torch.equal(y[:-1], wanted) and y[-1].isnan().all()

    @pytest.mark.parametrize("fmt, outputs, inputs", [("int4", 192, 256), ("mxfp4", 384, 768)])
    def test_shapes_that_only_it_takes_against_float64(fmt, outputs, inputs):
        weight, dense = random_experts(fmt, len(COUNTS), outputs, inputs)
        rows, offsets = sum(COUNTS), offsets_of(COUNTS)
        x = values(rows, inputs)
        wanted = per_expert(x, dense.transpose(1, 2), COUNTS)
        for block in (own for own in BLOCKS if outputs % own.rows == 0):
            for size in TILES:
                y = poisoned(rows, outputs)
                tiles = row_tiles(offsets, rows, size)
                hopper_few.forward(in_order(x, weight), weight, y[:-1], tiles, offsets, 0, 132, None, 1, block)
                assert relative_error(y[:-1], wanted) < tolerance() and y[-1].isnan().all()
