"""SGLang as Orbit's rollout engine: versions in slots, requests that carry their version, proofs of delivery.

A new version is loaded beside the live ones under a name of its own; requests in flight finish on theirs; a version is
dropped when our own count of its requests is zero. SGLang's unload blocks every load while it drains, and a request for
a name whose unload has begun fails, so neither is ever let happen. Left out: processes (process.py), SGLang's request
fields (service.py), what the plugin does (orbit_cli.sglang_plugin).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from orbit_cli.config.schema.system import Device, EngineConfig, HardwareConfig
from orbit_cli.engine.arguments import server_arguments
from orbit_cli.engine.log import one_line
from orbit_cli.engine.process import EngineProcess
from orbit_cli.engine.targets import check_targets
from orbit_cli.errors import CheckpointError, EngineError
from orbit_cli.sglang_plugin.room import AdapterRoom, write_room
from orbit_cli.types import AdapterSpec, AdapterVersion, Completion, FinishReason, SampleRequest, SwapReceipt

_NAME = "orbit@"
_FLUSH_TIMEOUT_S = 60.0
_SEED_MASK = (1 << 63) - 1


class SGLangEngine:
    """One SGLang engine on `base` (a checkpoint folder) with room for adapters of `spec`.

    `spec.kind` is what a run uses; an engine for which both `spec.block_size` and `spec.rank` are set holds versions of
    both kinds. Raises ConfigError or CheckpointError at once for what can never be served. See protocol.RolloutEngine.
    """

    def __init__(
        self,
        base: Path,
        spec: AdapterSpec,
        *,
        engine: EngineConfig,
        hardware: HardwareConfig,
        model_dtype: str,
        seed: int,
        log_path: Path,
    ):
        self.base, self.spec, self.config, self.hardware = Path(base), spec, engine, hardware
        self.checkpoint = _read_config(self.base)
        check_targets(self.checkpoint, spec)
        settings = {
            "arguments": server_arguments(self.base, engine, hardware, model_dtype, seed),
            "extra": dict(engine.extra),
            "architectures": list(self.checkpoint.get("architectures") or []),
        }
        self._process = EngineProcess(settings, self._environment(), log_path)
        self._launched = False
        self._start_report: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}  # version -> requests that run on it, oldest first
        self._loading: set[int] = set()
        self._base_requests = 0

    def __enter__(self) -> SGLangEngine:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.shutdown()

    # Life ---------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Begin to load the base in the background; `start` waits for it."""
        self._process.launch()
        self._launched = True

    def start(self) -> None:
        """Load the base; returns when the plugin has answered. Raises EngineError with the cause and the log."""
        try:
            if not self._launched:
                self.launch()
            self._start_report = self._process.wait(self.config.start_timeout_s)
        except EngineError as error:
            text = str(error)
            if not text.startswith("the engine did not start"):
                text = f"the engine did not start: {one_line(text)}; its log is {self._process.log_path}"
            raise EngineError(text) from None

    def shutdown(self) -> None:
        """End all processes of the engine. Safe at any time and more than once."""
        self._process.end()

    # Versions -----------------------------------------------------------------------------------------------------

    def publish(self, version: AdapterVersion) -> SwapReceipt:
        """Load `version` beside the live ones and return the scheduler's own checksum of what it now holds.

        Drained older versions make room. Raises EngineError if the number is live already, no slot is free, a tensor is
        unknown or malformed, or the checksum differs; the engine lives on and the version is then not live.
        """
        from orbit_cli.sglang_plugin.bucket import pack

        began = time.perf_counter()
        self._reserve(version.number)
        try:
            flat, index = pack(version.tensors)
            about = {
                "kind": version.spec.kind,
                "scaling": version.spec.scaling,
                "checksum": version.checksum,
                "index": index,
            }
            bucket = flat.view(_byte_type()).numpy().tobytes()
            held = self._process.call("load", name=adapter_name(version.number), bucket=bucket, about=about).result()
            self._check_held(version, held)
        except BaseException:
            with self._lock:
                self._loading.discard(version.number)
            raise
        with self._lock:
            self._loading.discard(version.number)
            self._live[version.number] = 0
        return SwapReceipt(
            version=version.number,
            checksum=held["checksum"],
            nbytes=held["nbytes"],
            tensors=held["tensors"],
            milliseconds=1000 * (time.perf_counter() - began),
        )

    def retire(self) -> list[int]:
        """Drop every version but the newest that no request uses; returns their numbers, oldest first."""
        with self._lock:
            newest = max(self._live, default=None)
            # Once out of _live no request can name them, so their unload has nothing to drain.
            dropped = [number for number, requests in self._live.items() if requests == 0 and number != newest]
            for number in dropped:
                del self._live[number]
        for number in dropped:
            self._process.call("unload", name=adapter_name(number)).result()
        return dropped

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._live)

    def _reserve(self, number: int) -> None:
        """Keep a slot for a version that is about to be loaded."""
        with self._lock:
            if number in self._live or number in self._loading:
                raise EngineError(f"version {number} is live already; publish under a new number")
            full = len(self._live) + len(self._loading) >= self.config.live_versions
        if full:
            self.retire()
        with self._lock:
            if len(self._live) + len(self._loading) >= self.config.live_versions:
                busy = dict(self._live)
                raise EngineError(
                    f"version {number} finds no free slot: engine.live_versions={self.config.live_versions} and "
                    f"requests run on {busy}; wait for them or raise engine.live_versions"
                )
            self._loading.add(number)

    @staticmethod
    def _check_held(version: AdapterVersion, held: dict[str, Any]) -> None:
        if held["checksum"] != version.checksum or held["tensors"] != len(version.tensors):
            raise EngineError(
                f"version {version.number} was sent with {len(version.tensors)} tensors and sha256 "
                f"{version.checksum[:12]}, but the engine holds {held['tensors']} with {held['checksum'][:12]}"
            )

    # Requests -----------------------------------------------------------------------------------------------------

    def generate(self, requests: list[SampleRequest]) -> list[Completion]:
        """Sample all requests; they enter SGLang's scheduler as one message. Completions in the order of requests."""
        return self._submit(list(requests)).result() if requests else []

    def submit(self, request: SampleRequest) -> Future[Completion]:
        """Start one request; it finishes on its version, whatever is published meanwhile."""
        return _then(self._submit([request]), lambda completions: completions[0])

    def score(self, token_ids: list[list[int]], version: int | None) -> list[list[float]]:
        """Log-probs of the tokens 1.. of each sequence under `version` at temperature 1."""
        if not token_ids:
            return []
        self._acquire([version])
        call = self._process.call("score", token_ids=token_ids, adapter=adapter_name(version))
        call.add_done_callback(lambda _: self._release([version]))
        return call.result()

    def flush_cache(self) -> None:
        """Forget all cached prefixes, once no request runs (waits up to a minute)."""
        self._process.call("flush", timeout_s=_FLUSH_TIMEOUT_S).result()

    def _submit(self, requests: list[SampleRequest]) -> Future[list[Completion]]:
        used = [request.version for request in requests]
        self._acquire(used)
        call = self._process.call("generate", requests=[_to_sglang(request) for request in requests])
        call.add_done_callback(lambda _: self._release(used))
        return _then(call, lambda outputs: [_completion(output) for output in outputs])

    def _acquire(self, used: list[int | None]) -> None:
        with self._lock:
            for number in used:
                if number is not None and number not in self._live:
                    raise EngineError(f"version {number} is not live; live versions are {sorted(self._live)}")
            for number in used:
                if number is None:
                    self._base_requests += 1
                else:
                    self._live[number] += 1

    def _release(self, used: list[int | None]) -> None:
        with self._lock:
            for number in used:
                if number is None:
                    self._base_requests -= 1
                else:
                    self._live[number] -= 1

    # Reports ------------------------------------------------------------------------------------------------------

    def base_checksum(self) -> str:
        """sha256 over the weights in the scheduler's memory, recomputed now (rank 0 of a tensor-parallel engine)."""
        return self._process.call("measure", base=True, adapters=False).result()["base_checksum"]

    def held_checksums(self) -> dict[int, str]:
        """Checksum of every held version, recomputed in the scheduler from the slots that requests multiply by."""
        report = self._process.call("measure", base=False, adapters=True).result()
        return {version_number(name): held["checksum"] for name, held in report["adapters"].items()}

    def gpu_memory(self) -> dict[str, int]:
        """Bytes on rank 0's GPU, peaks since the start: `allocated` by tensors, `reserved`; empty on a CPU."""
        if self.hardware.device is Device.cpu:
            return {}
        return self._process.call("info").result()["gpu_memory"]

    def info(self) -> dict[str, Any]:
        """SGLang's and the plugin's versions, hooks, adapters held, live versions with their running requests."""
        report = self._process.call("info").result()
        with self._lock:
            requests = {"base": self._base_requests, **{str(n): count for n, count in self._live.items()}}
        return {**self._start_report, **report, "requests": requests}

    def _environment(self) -> dict[str, str]:
        """Ours, plus what the engine's processes need to find: this package, the room for adapters, the threads."""
        import orbit_kernels

        environment = dict(os.environ)
        roots = [str(Path(__file__).parents[2]), str(Path(orbit_kernels.__file__).parents[1])]
        environment["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(roots), *_split(os.environ.get("PYTHONPATH"))])
        environment.pop("TRITON_INTERPRET", None)
        environment.setdefault("SGLANG_PLUGINS", "orbit")  # other plugins in the environment are not ours to start
        if self.hardware.device is Device.cpu:
            environment["OMP_NUM_THREADS"] = str(self.hardware.threads or os.cpu_count() or 1)
            # Threads that spin for long on busy cores make a product 5 to 9 times slower (64 x 1536 x 576, two cores).
            environment.setdefault("GOMP_SPINCOUNT", "10000")
            environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy's own pool would keep the engine from forking
            environment["CUDA_VISIBLE_DEVICES"] = ""
            if self.config.tensor_parallel > 1:
                environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_of_ranks(self.config.tensor_parallel))
        room = AdapterRoom(
            targets=self.spec.targets,
            expert_targets=self.spec.expert_targets,
            block_size=self.spec.block_size,
            rank=self.spec.rank,
            versions=self.config.live_versions,
            expert_width=self.spec.expert_width,
            scaling=self.spec.scaling,
        )
        write_room(room, environment)
        return environment


def adapter_name(version: int | None) -> str | None:
    """SGLang's name of a version; None is the base.

    >>> adapter_name(123)
    'orbit@000123'
    """
    return None if version is None else f"{_NAME}{version:06d}"


def version_number(name: str | None) -> int | None:
    """The inverse of `adapter_name`."""
    return None if name is None else int(name.removeprefix(_NAME))


def _to_sglang(request: SampleRequest) -> dict[str, Any]:
    params = request.params
    sampling = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "sampling_seed": request.seed & _SEED_MASK,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": not params.stop_token_ids,
    }
    return {"token_ids": list(request.token_ids), "adapter": adapter_name(request.version), "sampling": sampling}


def _completion(output: dict[str, Any]) -> Completion:
    finish = output["finish"] or {}
    reason = FinishReason(finish.get("type", "abort"))
    tokens, logprobs, stamps = output["token_ids"], output["logprobs"], output["adapters"]
    if reason is FinishReason.abort:
        tokens, logprobs, stamps = tokens[: len(logprobs)], logprobs[: len(tokens)], stamps[: len(tokens)]
    if not len(tokens) == len(logprobs) == len(stamps):
        raise EngineError(
            f"the engine returned {len(tokens)} tokens with {len(logprobs)} log-probs and {len(stamps)} version stamps"
        )
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        versions=[version_number(name) for name in stamps],
        finish_reason=reason,
        cached_tokens=output["cached_tokens"],
    )


def _then(future: Future, convert: Callable) -> Future:
    """A future of `convert(result)`."""
    converted: Future = Future()

    def finish(done: Future) -> None:
        error = done.exception()
        if error is not None:
            converted.set_exception(error)
            return
        try:
            converted.set_result(convert(done.result()))
        except Exception as failure:  # a malformed answer belongs to whoever waits for it, not to the reading thread
            converted.set_exception(failure)

    future.add_done_callback(finish)
    return converted


def _read_config(base: Path) -> dict[str, Any]:
    try:
        return json.loads((base / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{base} is no checkpoint folder: {error}; point to a folder with config.json") from error


def _cores_of_ranks(ranks: int) -> str:
    """SGLang's binding of CPU ranks to cores, `first|second|...`; ranks beyond the cores share them."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank % len(cores) :: ranks] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _split(paths: str | None) -> list[str]:
    return [path for path in (paths or "").split(os.pathsep) if path]


def _byte_type():
    import torch

    return torch.uint8
