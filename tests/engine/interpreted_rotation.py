"""Cases for the rotation kernel under TRITON_INTERPRET=1; run by test_plugin_math.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

from orbit_cli.sglang_plugin.rotation import rotate_slots, rotate_slots_reference


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "projections"), [(5, 1, 3), (70, 2, 1)])
def test_rotation_kernel_equals_its_reference(tokens, heads, projections, transpose):
    slots, n, b = 3, 2, 16
    x = torch.randn(tokens, heads, n * b)
    blocks = torch.randn(slots, projections, n, b, b) / 4
    token_slot = torch.randint(0, slots, (tokens + 9,), dtype=torch.int32)  # the static buffer is longer
    found = rotate_slots(x, blocks, token_slot, transpose)
    want = rotate_slots_reference(x.double(), blocks.double(), token_slot, transpose)
    assert found.shape == (projections, tokens, heads, n * b)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    wrong = (token_slot + 1) % slots
    assert float((rotate_slots(x, blocks, wrong, transpose).double() - want).abs().max()) > 0.1
