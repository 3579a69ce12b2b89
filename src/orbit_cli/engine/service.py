"""Operations on an embedded SGLang engine, inside the engine's process; all run on its one event loop.

Knows SGLang's request and response fields. Left out: which versions are live and how many requests they have
(sglang_engine.py decides that; here a name is only passed on).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

from orbit_cli.engine.arguments import check_extra
from orbit_cli.engine.embedded import narrow_model_registry, start_engine
from orbit_cli.errors import EngineError

PLUGIN_KEY = "orbit"  # of the scheduler's internal state
STAMP_KEY = "orbit_version"  # of a response's meta information
_ENTRY_POINT = "orbit"
_NO_PLUGIN = (
    "SGLang runs without Orbit's plugin, so adapters would not be applied. Install the project (pip install orbit-cli, "
    "or pip install -e .) and leave SGLANG_PLUGINS unset or add orbit to it"
)


class Service:
    """The embedded engine. `settings` has SGLang's `arguments` and the names in `extra` that a user added."""

    def __init__(self, settings: dict[str, Any], loop: asyncio.AbstractEventLoop):
        self.settings, self.loop = settings, loop

    async def start(self) -> dict[str, Any]:
        """Load the engine and shake hands with the plugin in its scheduler."""
        began = time.monotonic()
        narrow_model_registry(self.settings["architectures"])
        import sglang
        from sglang.srt.server_args import ServerArgs

        check_extra(self.settings["extra"], [field.name for field in dataclasses.fields(ServerArgs)])
        self._require_plugin()
        # On the loop's own thread, and with the loop running: the engine takes it over as its own.
        self.engine = start_engine(self.settings["arguments"])
        self.manager = self.engine.tokenizer_manager
        report = await self._plugin_report()
        self._forget_load_file()
        return {
            "sglang": sglang.__version__,
            "seconds_to_start": time.monotonic() - began,
            "context_length": self.manager.model_config.context_len,
            **report,
        }

    def _require_plugin(self) -> None:
        """Before minutes of loading: SGLang must at least find the plugin that its processes are to load."""
        from sglang.srt.plugins import load_plugins_by_group

        if _ENTRY_POINT not in load_plugins_by_group("sglang.srt.plugins"):
            raise EngineError(_NO_PLUGIN)

    def _forget_load_file(self) -> None:
        """Remove the name of the file in /dev/shm that scheduler and tokenizer share (the load, for SGLang's router).

        Both hold it open; SGLang never removes it, so each start of an engine would leave one for good.
        """
        reader = getattr(self.manager, "load_snapshot_reader", None)
        if reader is not None and str(getattr(reader, "path", "")).startswith("/dev/shm/sglang_loads_"):
            Path(reader.path).unlink(missing_ok=True)

    async def _plugin_report(self) -> dict[str, Any]:
        state = (await self.manager.get_internal_state())[0]
        report = state.get(PLUGIN_KEY)
        if report is None:
            raise EngineError(_NO_PLUGIN)
        if report["missing_hooks"]:
            raise EngineError(f"SGLang did not take over the plugin's hook on {report['missing_hooks'][0]}")
        return {**report, "total_tokens": state.get("memory_usage", {}).get("token_capacity")}

    async def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Sample a batch that reaches the scheduler as one message. Requests: token_ids, adapter, sampling."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        outputs = await self._run(
            GenerateReqInput(
                input_ids=[request["token_ids"] for request in requests],
                sampling_params=[request["sampling"] for request in requests],
                lora_path=[request["adapter"] for request in requests],
                return_logprob=True,
            )
        )
        return [
            {
                "token_ids": list(output["output_ids"]),
                "logprobs": [entry[0] for entry in output["meta_info"]["output_token_logprobs"]],
                "adapters": output["meta_info"].get(STAMP_KEY, []),
                "finish": output["meta_info"]["finish_reason"],
                "cached_tokens": output["meta_info"].get("cached_tokens", 0),
            }
            for output in outputs
        ]

    async def score(self, token_ids: list[list[int]], adapter: str | None) -> list[list[float]]:
        """Log-probs of the tokens 1.. of each sequence; SGLang leaves input log-probs at temperature 1."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        outputs = await self._run(
            GenerateReqInput(
                input_ids=token_ids,
                sampling_params=[{"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}] * len(token_ids),
                lora_path=[adapter] * len(token_ids),
                return_logprob=True,
                logprob_start_len=0,
            )
        )
        return [[entry[0] for entry in output["meta_info"]["input_token_logprobs"]][1:] for output in outputs]

    async def _run(self, request) -> list[dict[str, Any]]:
        stream = self.manager.generate_request(request, None)
        try:
            return await anext(stream)
        finally:
            await stream.aclose()

    async def load(self, name: str, bucket: bytes, about: dict[str, Any]) -> dict[str, Any]:
        """Push one version; returns what the scheduler holds under its name afterwards."""
        import torch
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        from orbit_cli.sglang_plugin.bucket import BUCKET

        # frombuffer has no empty tensors; an empty version is the plugin's to refuse.
        flat = torch.frombuffer(bytearray(bucket or b"\0\0"), dtype=torch.bfloat16)[: len(bucket) // 2]  # [elements]
        # A handle of shared memory can be taken once, so every rank gets its own.
        ranks = range(self.settings["arguments"]["tp_size"])
        payloads = [MultiprocessingSerializer.serialize({BUCKET: flat}) for _ in ranks]
        result = await self.manager.load_lora_adapter_from_tensors(
            LoadLoRAAdapterFromTensorsReqInput(
                lora_name=name,
                config_dict={"orbit": about},
                serialized_named_tensors=payloads,
            )
        )
        if not result.success:
            raise EngineError(f"the engine refused {name}: {result.error_message}")
        held = (await self._plugin_report())["adapters"].get(name)
        if held is None:
            raise EngineError(f"the engine accepted {name} but does not hold it")
        return held

    async def unload(self, name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        result = await self.manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
        if not result.success:
            raise EngineError(f"the engine did not unload {name}: {result.error_message}")

    async def measure(self, base: bool, adapters: bool) -> dict[str, Any]:
        """The plugin's report with checksums recomputed."""
        self.engine.collective_rpc("orbit_measure", base=base, adapters=adapters)
        return await self._plugin_report()

    async def info(self) -> dict[str, Any]:
        return await self._plugin_report()

    async def flush(self, timeout_s: float) -> None:
        """Drop the prefix cache; SGLang only does so when nothing runs, so this waits."""
        deadline = time.monotonic() + timeout_s
        while not (await self.manager.flush_cache()).success:
            if time.monotonic() > deadline:
                raise EngineError(f"the prefix cache could not be flushed within {timeout_s:g} s: requests are running")
            await asyncio.sleep(0.05)
