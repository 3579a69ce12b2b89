"""Which GPUs a process may use, on machines made of files and a program called nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orbit_cli.planner import gpus
from orbit_cli.planner.gpus import Gpu, usable_gpus

ROWS = ["GPU-aaaa-1, 143771, 4, Disabled", "GPU-aabb-2, 143771, 120000, Disabled", "GPU-cccc-3, 143771, [N/A], [N/A]"]


class Machine:
    """A file system, and what nvidia-smi does in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.environment = root, {"PATH": str(root / "bin")}
        (root / "dev").mkdir()
        (root / "bin").mkdir()

    def devices(self, *names: str) -> Machine:
        for name in names:
            (self.root / "dev" / name).touch()
        return self

    def nvidia_smi(self, *rows: str, then: str = "exit 0") -> Machine:
        program = self.root / "bin/nvidia-smi"
        lines = "".join(f"echo '{row}'\n" for row in rows)
        program.write_text(f"#!/bin/sh\n{lines}{then}\n")
        program.chmod(0o755)
        return self

    def sees(self, chosen: str | None = None) -> list[Gpu] | None:
        more = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
        return usable_gpus(self.root, self.environment | more)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setenv("PATH", found.environment["PATH"])  # where programs are looked up
    return found


def test_no_gpu(machine: Machine) -> None:
    assert machine.devices("null", "nvidiactl", "nvidia-uvm", "nvidia-modeset").sees() == []
    assert machine.sees("0") == []


def test_device_files_are_counted_whatever_their_numbers(machine: Machine) -> None:
    assert machine.devices("nvidiactl", "nvidia3").sees() == [Gpu()]
    assert len(machine.devices("nvidia0", "nvidia10").sees()) == 3
    assert machine.sees("0,2") == [Gpu(), Gpu()]
    assert machine.sees("3") == []


def test_numbers_that_only_look_so_and_blank_lines(machine: Machine) -> None:
    assert machine.devices("nvidia0").nvidia_smi("GPU-aaaa-1, \u00b2, 0, Disabled", "").sees() == [
        Gpu(uuid="GPU-aaaa-1", total_mib=None, used_mib=0)
    ]


def test_nvidia_smi_knows_memory(machine: Machine) -> None:
    first, second, third = machine.devices("nvidia0").nvidia_smi(*ROWS).sees()
    assert first == Gpu(uuid="GPU-aaaa-1", total_mib=143_771, used_mib=4)
    assert (first.free_mib, second.free_mib, third.free_mib) == (143_767, 23_771, None)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,1", [0, 1]),
        ("2, 0", [2, 0]),
        ("0,-1,1", [0]),  # up to the first that is none
        ("1,7,0", [1]),
        ("0,0", []),  # CUDA refuses the whole list
        ("GPU-cccc-3", [2]),
        ("GPU-cc,GPU-aaaa", [2, 0]),
        ("GPU-aa", []),  # two begin so
        ("GPU-dddd", []),
    ],
)
def test_cuda_visible_devices(chosen: str | None, expected: list[int], machine: Machine) -> None:
    listed = [row.partition(",")[0] for row in ROWS]
    assert [gpu.uuid for gpu in machine.nvidia_smi(*ROWS).sees(chosen)] == [listed[number] for number in expected]


def test_uuids_where_only_device_files_are_there(machine: Machine) -> None:
    assert len(machine.devices("nvidia0", "nvidia1").sees("GPU-aaaa,GPU-bbbb")) == 2
    assert len(machine.sees("GPU-aaaa,GPU-bbbb,GPU-cccc")) == 2


def test_of_a_split_gpu_one_instance_is_seen(machine: Machine) -> None:
    rows = ["GPU-aaaa-1, 143771, 4, Enabled", "GPU-bbbb-2, 143771, 4, Enabled"]
    assert machine.nvidia_smi(*rows).sees() == [Gpu(uuid="GPU-aaaa-1", split=True)]
    assert machine.sees("MIG-1234,MIG-5678") == [Gpu(split=True)]
    (machine.root / "bin/nvidia-smi").unlink()
    (machine.root / "proc/driver/nvidia/capabilities/gpu0/mig/gi1").mkdir(parents=True)
    assert machine.devices("nvidia0", "nvidia1").sees() == [Gpu(split=True)]


@pytest.mark.parametrize(
    "broken",
    [
        {"then": "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9"},
        {"then": "exit 0"},
        {"rows": ["nonsense"]},
        {"rows": ROWS, "then": "exit 15"},
    ],
)
def test_an_nvidia_smi_that_fails_is_not_believed(broken: dict, machine: Machine) -> None:
    machine.devices("nvidia0").nvidia_smi(*broken.get("rows", []), then=broken.get("then", "exit 0"))
    assert machine.sees() == [Gpu()]


def test_an_nvidia_smi_that_hangs_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.2)
    machine.devices("nvidia0").nvidia_smi(then="exec /bin/sleep 60")
    started = time.monotonic()
    assert machine.sees() == [Gpu()]
    assert time.monotonic() - started < 10


def test_a_program_that_cannot_be_run(machine: Machine) -> None:
    (machine.root / "bin/nvidia-smi").mkdir()
    assert machine.devices("nvidia0").sees() == [Gpu()]


def test_windows_subsystem_without_nvidia_smi_cannot_be_told(machine: Machine) -> None:
    assert machine.devices("dxg").sees() is None
    assert len(machine.nvidia_smi(*ROWS).sees()) == 3
