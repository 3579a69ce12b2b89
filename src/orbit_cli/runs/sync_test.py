"""`orbit sync-test`: prove on demand that trainer and engine compute the same thing, and that swaps arrive."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from orbit_cli.config.schema.root import OrbitConfig
from orbit_cli.config.schema.system import Inject
from orbit_cli.errors import writing
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.quantization.identity import base_checksum
from orbit_cli.runs.assembly import check_device, probes, serving
from orbit_cli.sync.proof import Check, Proof
from orbit_cli.telemetry.files import write_json
from orbit_cli.telemetry.recorder import Recorder
from orbit_cli.telemetry.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncTestResult:
    """The table and where its JSON is."""

    checks: list[Check]
    path: Path

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def sync_test(config: OrbitConfig) -> SyncTestResult:
    """Run the proof at the config's scale. `sync.inject` breaks it on purpose, to see that the test can fail."""
    check_device(config)
    folder = RunFolder.create(config)
    recorder = Recorder(folder, config)
    with folder.running(), recorder:
        altered = _altered_base(config, folder, recorder) if config.sync.inject is Inject.alter_base else None
        with serving(config, folder.engine_log, recorder.notify, served_base=altered, with_trainer=True) as served:
            proof = Proof(probes(config, served), config.sync, config.sync.inject)
            recorder.notify("comparing trainer and engine")
            checks = proof.run(base_checksum(served.base), base_checksum(served.engine.base))
        path = folder.path / "sync_test.json"
        failed = [check.cause for check in checks if not check.passed]
        write_json(path, {"passed": not failed, "causes": failed, "checks": [asdict(c) for c in checks]})
    if altered is not None:
        shutil.rmtree(altered)
    return SyncTestResult(checks=checks, path=path)


def _altered_base(config: OrbitConfig, folder: RunFolder, recorder: Recorder) -> Path:
    """A copy of the base with one byte of one frozen weight changed, for the engine alone."""
    base = prepare_base(config.model, config.quantization, recorder.notify)
    copy = folder.path / "altered_base"
    with writing(copy):
        shutil.copytree(base, copy)
    recorder.notify(f"altered one byte of {_alter_one_byte(copy)} in the engine's copy of the base")
    return copy


def _alter_one_byte(folder: Path) -> str:
    """Flip the highest bit of a byte in the middle of a safetensors folder's largest tensor; returns its name."""
    file = sorted(folder.glob("*.safetensors"))[0]
    with file.open("r+b") as data:
        length = int.from_bytes(data.read(8), "little")
        header = {k: v for k, v in json.loads(data.read(length)).items() if k != "__metadata__"}
        name = max(header, key=lambda k: header[k]["data_offsets"][1] - header[k]["data_offsets"][0])
        start, end = header[name]["data_offsets"]
        place = 8 + length + (start + end) // 2
        data.seek(place)
        byte = data.read(1)[0]
        data.seek(place)
        data.write(bytes([byte ^ 0x80]))
    return name
