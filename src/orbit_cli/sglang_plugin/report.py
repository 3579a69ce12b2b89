"""What the plugin tells the engine's owner about itself, from inside the scheduler's process.

`measure` (a method put on SGLang's Scheduler, reached by its collective call, which returns nothing) recomputes
checksums; `answer` adds the plugin's report to the scheduler's internal state, which does come back. An engine whose
internal state has no "orbit" entry runs without the plugin.
"""

from __future__ import annotations

import hashlib
import os

import torch
from torch import nn

from orbit_cli.adapters.bundle import raw_bytes

KEY = "orbit"
_CHUNK_ROWS = 4096  # rows of a tensor that are brought to the CPU at a time


def answer(result, scheduler, _request):
    """After Scheduler.get_internal_state: the report, in msgpack-native values."""
    from orbit_cli.sglang_plugin.plugin import PLUGIN_VERSION, applied_hooks

    manager = scheduler.tp_worker.model_runner.lora_manager
    applied, missing = applied_hooks()
    result.internal_state[KEY] = {
        "plugin": PLUGIN_VERSION,
        "pid": os.getpid(),
        "hooks": applied,
        "missing_hooks": missing,
        "manager": type(manager).__name__,
        "adapters": {
            version.name: {
                "slot": version.slot,
                "checksum": version.checksum,
                "tensors": len(version.names),
                "nbytes": version.nbytes,
            }
            for version in manager.held.values()
        },
        "base_checksum": getattr(scheduler, "orbit_base_checksum", None),
        "gpu_memory": _gpu_memory(),
    }
    return result


def _gpu_memory() -> dict[str, int] | None:
    """Bytes that this rank's tensors took at the peak since the start, and that its allocator keeps; None on a CPU."""
    if not torch.cuda.is_initialized():
        return None
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def measure(scheduler, base: bool = False, adapters: bool = False) -> None:
    """Recompute the checksums that the next `answer` reports: of the base weights, of the held adapters."""
    runner = scheduler.tp_worker.model_runner
    if base:
        scheduler.orbit_base_checksum = base_checksum(runner.model)
    if adapters:
        for version in runner.lora_manager.held.values():
            version.checksum = runner.lora_manager.measure(version)


def base_checksum(model: nn.Module) -> str:
    """sha256 over every weight that the model multiplies by on this rank: parameters, buffers, prepared INT4 parts.

    Adapter buffers are not part of it: they live outside the module tree.
    """
    digest = hashlib.sha256()
    for name, tensor in _weights(model):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        rows = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.detach().reshape(1, -1)
        for chunk in rows.split(_CHUNK_ROWS):
            digest.update(raw_bytes(chunk))
    return digest.hexdigest()


def _weights(model: nn.Module):
    yield from sorted(model.named_parameters(), key=lambda item: item[0])
    yield from sorted(model.named_buffers(), key=lambda item: item[0])
    for path, module in sorted(model.named_modules(), key=lambda item: item[0]):
        for number, piece in enumerate(getattr(module, "orbit_pieces", None) or []):
            for field, value in sorted(vars(piece).items()):
                if isinstance(value, torch.Tensor):
                    yield f"{path}.piece{number}.{field}", value
