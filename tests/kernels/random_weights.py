"""Random packed weights of every number format, with the float64 weight worked out element by element."""

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def random_case(fmt: str, rows: int, columns: int, lead: tuple[int, ...] = ()):
    """(packed, scale, global_scale, float64 weight) of random codes; the weight is computed element by element."""
    codes = torch.randint(0, 16, (*lead, rows, columns))
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    if fmt == "int4":
        scale = (torch.rand(*lead, rows, columns // 32) + 0.1).to(torch.bfloat16)
        weight = (codes - 8).double() * scale.double().repeat_interleave(32, -1)
        return packed, scale, None, weight
    if fmt == "mxfp4":
        scale = torch.randint(110, 140, (*lead, rows, columns // 32), dtype=torch.uint8)
        weight = E2M1[codes] * (2.0 ** (scale.double() - 127)).repeat_interleave(32, -1)
        return packed, scale, None, weight
    if fmt == "nvfp4":
        scale = (torch.rand(*lead, rows, columns // 16) * 400 + 1).to(torch.float8_e4m3fn)
        global_scale = torch.rand(*lead, 1) * 1000 + 1
        effective = scale.float() / global_scale.unsqueeze(-1)  # float32, as compressed-tensors divides
        return packed, scale, global_scale, E2M1[codes] * effective.double().repeat_interleave(16, -1)
    if fmt == "fp8":
        packed = (torch.randn(*lead, rows, columns) * 50).to(torch.float8_e4m3fn)
        scale = torch.rand(*lead, -(-rows // 128), -(-columns // 128)) + 0.01
        full = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]
        return packed, scale, None, packed.double() * full
    weight = torch.randn(*lead, rows, columns).to(torch.bfloat16)
    return weight, None, None, weight.double()
