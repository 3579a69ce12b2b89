"""Starting, failing and ending: clear errors, bounded times, no process left behind, the same numbers every time."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_models import ATTENTION, MLP, Reference, random_version, write_checkpoint
from engine_setup import both_kinds, make_engine

from orbit_cli.errors import CheckpointError, ConfigError, EngineError
from orbit_cli.types import SampleRequest, SamplingParams

SPEC = both_kinds(ATTENTION + MLP)


def _group_is_gone(leader: int, timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _requests(version: int | None) -> list[SampleRequest]:
    prompts = [list(range(start, start + 30)) for start in (5, 60, 120)]
    params = SamplingParams(max_new_tokens=16)
    return [
        SampleRequest(token_ids=prompt, params=params, version=version, seed=10 * i + j)
        for i, prompt in enumerate(prompts)
        for j in range(3)
    ]


def test_two_engines_give_the_same_bits_and_a_crash_is_one_sentence(dense, tmp_path):
    version = dense.version()
    second = make_engine(dense.folder, dense.spec, tmp_path / "second.log")
    with second:
        first_checksum = dense.engine.base_checksum()
        assert second.base_checksum() == first_checksum == dense.engine.base_checksum()
        for engine in (dense.engine, second):
            engine.publish(version)
            engine.flush_cache()
        for number in (None, version.number):
            ours, theirs = dense.engine.generate(_requests(number)), second.generate(_requests(number))
            assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
            assert [c.logprobs for c in ours] == [c.logprobs for c in theirs]
            assert len({tuple(c.token_ids) for c in ours}) == len(ours)

        host, scheduler = second._process._process.pid, second.info()["pid"]
        assert os.getsid(host) == host == os.getsid(scheduler) != os.getsid(0)  # Ctrl-C of our terminal misses them
        shared = [os.readlink(link) for link in Path(f"/proc/{scheduler}/fd").iterdir()]
        assert [name for name in shared if "sglang_loads" in name and not name.endswith("(deleted)")] == []
        running = second.submit(dataclasses.replace(_requests(None)[0], params=SamplingParams(max_new_tokens=400)))
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"^the engine stopped: .*; its log is \S*second\.log$"):
            running.result(timeout=60)
        assert time.monotonic() - began < 15
        for call in (lambda: second.generate(_requests(None)), second.info, lambda: second.publish(dense.version())):
            with pytest.raises(EngineError, match="its log is"):
                call()
        assert _group_is_gone(host)
    second.shutdown()  # once more: nothing to do, nothing to raise
    dense.clear()


def test_an_altered_base_has_another_checksum_and_a_broken_one_fails_with_the_cause(dense, tmp_path):
    folder = tmp_path / "altered"
    folder.mkdir()
    for file in dense.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-2000] ^= 0x40  # one bit of the last tensor
    (folder / "model.safetensors").write_bytes(data)
    with make_engine(folder, SPEC, tmp_path / "altered.log") as altered:
        assert altered.base_checksum() != dense.engine.base_checksum()
        assert altered.score([list(range(5, 30))], None) != dense.engine.score([list(range(5, 30))], None)
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    broken = make_engine(folder, SPEC, tmp_path / "broken.log")
    with pytest.raises(
        EngineError, match=r"^the engine did not start: SafetensorError: [^\n]*; its log is \S*broken\.log$"
    ):
        broken.start()
    assert _group_is_gone(broken._process._process.pid)


def test_without_the_plugin_the_engine_refuses_to_start(dense, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "smg-servicer")
    engine = make_engine(dense.folder, SPEC, tmp_path / "log")
    with pytest.raises(EngineError, match=r"without Orbit's plugin.*leave SGLANG_PLUGINS unset"):
        engine.start()
    assert _group_is_gone(engine._process._process.pid)


def test_unknown_arguments_are_refused_with_the_nearest_names(dense, tmp_path):
    engine = make_engine(dense.folder, SPEC, tmp_path / "log", extra={"chunked_prefil_size": 64})
    with pytest.raises(ConfigError, match=r"engine\.extra\.chunked_prefil_size is no argument.*chunked_prefill_size"):
        engine.start()
    with pytest.raises(ConfigError, match="Orbit sets max_loras_per_batch itself"):
        make_engine(dense.folder, SPEC, tmp_path / "log", extra={"max_loras_per_batch": 9})


def test_what_cannot_be_served_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint folder"):
        make_engine(tmp_path, SPEC, tmp_path / "log")
    write_checkpoint(tmp_path / "llama", "llama")
    for targets, experts, message in (
        (("q_pro",), (), r"adapter\.targets has 'q_pro' \(nearest: q_proj\)"),
        (("embed_tokens",), (), "cannot serve as oft on model type llama"),
        (("q_proj",), ("up_proj",), r"adapter\.expert_targets has 'up_proj'.*no routed experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_engine(tmp_path / "llama", both_kinds(targets, experts), tmp_path / "log")


def test_a_start_that_hangs_is_bounded(tmp_path):
    write_checkpoint(tmp_path / "llama", "llama")
    engine = make_engine(tmp_path / "llama", SPEC, tmp_path / "log", start_timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not start within engine\.start_timeout_s=0\.5"):
        engine.start()
    assert time.monotonic() - began < 20 and _group_is_gone(engine._process._process.pid)


def test_the_engine_dies_with_its_owner(tmp_path):
    write_checkpoint(tmp_path / "llama", "llama")
    script = f"""
import threading, time
from pathlib import Path
from engine_setup import make_engine
from test_engine_process import SPEC
engine = make_engine(Path({str(tmp_path / "llama")!r}), SPEC, Path({str(tmp_path / "log")!r}))
threading.Thread(target=engine.start, daemon=True).start()
while engine._process._process is None:
    time.sleep(0.05)
print(engine._process._process.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    host = int(owner.stdout.readline())
    time.sleep(2.0)
    os.killpg(host, 0)  # it runs
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert _group_is_gone(host)


def test_int4_llama_with_tied_embeddings(tmp_path):
    """The family and format of the main job."""
    model = write_checkpoint(tmp_path / "llama", "llama", quantised=("self_attn", "mlp"))
    reference = Reference(model)
    version = random_version(7, SPEC, model, kind="oft")
    with make_engine(tmp_path / "llama", SPEC, tmp_path / "log") as engine:
        engine.publish(version)
        for number, adapter in ((None, None), (7, version)):
            for request, completion in zip(_requests(number), engine.generate(_requests(number)), strict=True):
                assert reference.gap(request.token_ids, completion, adapter) < 1e-4
        before = engine.base_checksum()
        assert before == engine.base_checksum()


def test_two_ranks_share_a_model_and_its_adapters(tmp_path):
    """Row-parallel inputs, column-parallel outputs and experts' halves are cut the same way for base and adapter."""
    spec = both_kinds(ATTENTION, MLP)
    model = write_checkpoint(tmp_path / "moe", "qwen3_moe", quantised=("experts",))
    reference = Reference(model)
    versions = [None, random_version(1, spec, model, kind="oft"), random_version(2, spec, model, kind="lora")]
    with make_engine(tmp_path / "moe", spec, tmp_path / "log", tensor_parallel=2) as engine:
        for version in versions[1:]:
            assert engine.publish(version).checksum == version.checksum
        for version in versions:
            requests = _requests(version and version.number)
            for request, completion in zip(requests, engine.generate(requests), strict=True):
                assert reference.gap(request.token_ids, completion, version) < 1e-4
        other = engine.generate(_requests(1))[0]
        assert reference.gap(_requests(1)[0].token_ids, other, None) > 0.02
