"""The checksum rule and the folder of a published version."""

import hashlib
import json

import pytest
import torch

from orbit_cli.adapters.bundle import checksum, host_bytes, load_version, make_version, raw_bytes, save_version
from orbit_cli.errors import CheckpointError
from orbit_cli.types import AdapterSpec

SPEC = AdapterSpec(kind="oft", targets=("q_proj",), block_size=4, neumann_terms=6)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.oft_R": torch.randn(2, 4, 4, generator=generator).bfloat16(),
        "a.oft_R": torch.randn(3, 4, 4, generator=generator).bfloat16(),
    }


def test_checksum_is_the_documented_rule():
    values = tensors()
    digest = hashlib.sha256()
    for name, shape in (("a.oft_R", "3,4,4"), ("b.oft_R", "2,4,4")):
        digest.update(f"{name}|bfloat16|{shape}|".encode())
        digest.update(values[name].view(torch.int16).numpy().tobytes())
    assert checksum(values) == digest.hexdigest()


def test_checksum_sees_names_shapes_dtypes_and_every_byte_but_not_strides_or_order():
    values = tensors()
    reference = checksum(values)
    assert checksum(dict(reversed(values.items()))) == reference
    strided = values["a.oft_R"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert checksum({**values, "a.oft_R": strided}) == reference
    assert checksum({"a.oft_R": values["a.oft_R"], "c.oft_R": values["b.oft_R"]}) != reference
    assert checksum({**values, "a.oft_R": values["a.oft_R"].reshape(3, 16)}) != reference
    assert checksum({**values, "a.oft_R": values["a.oft_R"].view(torch.float16)}) != reference
    flipped = values["b.oft_R"].clone()
    flipped.view(torch.int16)[1, 2, 3] ^= 1
    assert checksum({**values, "b.oft_R": flipped}) != reference


def test_version_goes_to_disk_and_back(tmp_path):
    version = make_version(7, SPEC, tensors())
    save_version(make_version(6, SPEC, {"old.oft_R": torch.zeros(1, 4, 4).bfloat16()}), tmp_path / "000007")
    folder = save_version(version, tmp_path / "000007")
    loaded = load_version(folder)
    assert (loaded.number, loaded.spec, loaded.checksum) == (7, SPEC, version.checksum)
    assert loaded.tensors.keys() == version.tensors.keys()
    assert all(torch.equal(loaded.tensors[n], t) for n, t in version.tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["000007"]
    assert version.nbytes == 5 * 16 * 2


def test_a_version_holds_cpu_bfloat16_only():
    with pytest.raises(ValueError, match=r"x\.oft_R"):
        make_version(0, SPEC, {"x.oft_R": torch.zeros(1, 4, 4)})


def test_damage_is_named(tmp_path):
    folder = save_version(make_version(1, SPEC, tensors()), tmp_path / "v")
    with pytest.raises(CheckpointError, match="no adapter version"):
        load_version(tmp_path / "nowhere")
    record = json.loads((folder / "version.json").read_text())
    (folder / "version.json").write_text(json.dumps(record | {"checksum": "0" * 64}))
    with pytest.raises(CheckpointError, match="altered"):
        load_version(folder)
    data = (folder / "tensors.safetensors").read_bytes()
    (folder / "tensors.safetensors").write_bytes(data[:-40])
    with pytest.raises(CheckpointError, match="no adapter version"):
        load_version(folder)


def test_bytes_come_in_order_whatever_is_joined():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (0, 4), (7,))]
    tensors += [tensors[0].to(torch.bfloat16).T, torch.arange(9).to(torch.uint8), tensors[3].to(torch.float8_e4m3fn)]
    for join in (1, 40, 1 << 20):
        assert [bytes(data) for data in host_bytes(tensors, join)] == [bytes(raw_bytes(t)) for t in tensors]
