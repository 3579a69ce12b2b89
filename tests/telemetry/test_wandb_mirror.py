"""The W&B mirror with the real wandb, offline: no row is lost, no secret leaves, and no failure reaches the run."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2 as records

from orbit_cli.config.compose import compose
from orbit_cli.config.schema.system import WandbMode
from orbit_cli.config.serialize import to_plain
from orbit_cli.telemetry.run_folder import RunFolder
from orbit_cli.telemetry.wandb_mirror import REDACTED, WandbMirror, redact


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(compose([f"run.root={tmp_path}", "logging=wandb_offline"]))


def mirror(folder: RunFolder) -> WandbMirror:
    config = folder.load_config()
    return WandbMirror(config.logging, folder, to_plain(config))


BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def scan(data: bytes) -> list[bytes]:
    """Payloads of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    assert data[:4] == b":W&B"
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # the rest of a block that holds no header is padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            at += BLOCK - at % BLOCK
            continue
        part = (b"" if kind in (FULL, FIRST) else part) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            found.append(part)
    return found


def stored(folder: RunFolder) -> list[records.Record]:
    """All records of all .wandb files of the run."""
    found = []
    for path in sorted(folder.path.glob("wandb/offline-run-*/*.wandb")):
        for payload in scan(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(payload)
            found.append(record)
    return found


def history(folder: RunFolder) -> list[dict[str, float]]:
    rows = []
    for record in stored(folder):
        if record.WhichOneof("record_type") == "history":
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows


def test_rows_of_all_kinds_arrive_whatever_their_step_order(folder: RunFolder) -> None:
    """A step that goes back makes wandb drop the row (https://github.com/wandb/wandb/issues/5632, 9449)."""
    rows = [("train", 1), ("train", 2), ("eval", 0), ("sync", 5), ("train", 3), ("eval", 2), ("train", 6), ("sync", 1)]
    first = mirror(folder)
    for kind, step in rows:
        first.log({"kind": kind, "step": step, "time": "now", "reward_mean": step / 8, "loss": None})
    first.close()
    assert first.failures == 0, first.problem
    again = mirror(folder)  # as after a resume: the step goes back to 4
    assert again.id == first.id
    for step in (4, 5):
        again.log({"kind": "train", "step": step, "time": "now", "reward_mean": step / 8})
    again.close()
    assert again.failures == 0, again.problem
    expected = [*rows, ("train", 4), ("train", 5)]
    found = history(folder)
    for kind, step in expected:
        assert any(r.get(f"{kind}/step") == step and r.get(f"{kind}/reward_mean") == step / 8 for r in found), (
            kind,
            step,
        )
    assert len(found) == len(expected)
    metrics = [record.metric for record in stored(folder) if record.WhichOneof("record_type") == "metric"]
    assert any(m.glob_name == "train/*" and m.step_metric == "train/step" for m in metrics)


def test_secrets_are_redacted() -> None:
    plain = {
        "api_key": "s3cret",
        "engine": {"extra": {"api_key": "s3cret", "admin_api_key": "s3cret", "page_size": 1}},
        "list": [{"password": "s3cret", "token": "s3cret", "hf_token": "s3cret"}],
        "rollout": {"max_new_tokens": 16, "stop_token_ids": [1]},
        "model": {"tokenizer": "/t", "api_key": None},
    }
    found = redact(plain)
    assert "s3cret" not in json.dumps(found)
    assert found["engine"]["extra"] == {"api_key": REDACTED, "admin_api_key": REDACTED, "page_size": 1}
    assert found["rollout"] == plain["rollout"] and found["model"] == plain["model"]


def test_the_config_that_is_stored_has_no_secret(folder: RunFolder) -> None:
    config = folder.load_config()
    config.engine.extra = {"api_key": "s3cret-value"}
    only = WandbMirror(config.logging, folder, to_plain(config))
    only.close()
    assert only.failures == 0, only.problem
    files = [path for path in folder.path.rglob("*") if path.is_file() and "wandb" in path.parts]
    assert files
    assert not [path for path in files if b"s3cret-value" in path.read_bytes()]
    assert any(b"smollm2_135m" in path.read_bytes() for path in files)  # the rest is there


def test_an_unreachable_server_stops_nothing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = folder.load_config()
    config.logging.wandb = WandbMode.online
    started = time.monotonic()
    one = WandbMirror(config.logging, folder, to_plain(config))
    for step in range(100):
        one.log({"kind": "train", "step": step, "time": "now", "loss": 0.0})
    assert time.monotonic() - started < 2.0  # the run's thread never waits
    one.close(timeout=3.0)
    assert time.monotonic() - started < 10.0
    assert one.failures > 0 and one.problem


def test_a_failing_wandb_is_counted_and_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("no key and no terminal\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    one = mirror(folder)
    one.log({"kind": "train", "step": 1, "time": "now", "loss": 0.0})
    one.close()
    assert one.failures == 1
    assert one.problem == "it could not start: UsageError: no key and no terminal"
