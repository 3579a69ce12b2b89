"""The entry point of group `sglang.srt.plugins`: what Orbit changes inside SGLang 0.5.17, in one table.

SGLang calls `register` in its main process and in every scheduler process, and swallows what goes wrong there; so the
engine's owner asks the scheduler afterwards which hooks were applied (report.py) and refuses to serve without them.
Left out: what each hook does (the modules named in the table).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from importlib import metadata

PLUGIN_VERSION = "1"
SGLANG_VERSION = "0.5.17"

_COMPRESSED = "sglang.srt.layers.quantization.compressed_tensors"
_WNA16 = f"{_COMPRESSED}.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16"
_WNA16_MOE = f"{_COMPRESSED}.schemes.compressed_tensors_wNa16_moe.CompressedTensorsWNA16TritonMoE"
_NATIVE_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

# (SGLang's attribute, our function as module:name, kind)
HOOKS = (
    ("sglang.srt.lora.lora_manager.LoRAManager", "manager:AdapterManager", "replace"),
    ("sglang.srt.layers.sampler.Sampler.forward", "sampler:sample", "around"),
    ("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "sampler:keep_seeds", "after"),
    ("sglang.srt.model_executor.model_runner.ModelRunner.sample", "stamp:stamp", "after"),
    ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "report:answer", "after"),
    ("sglang.srt.managers.scheduler.Scheduler._can_schedule_lora_req", "groups:may_run", "around"),
    ("sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority", "groups:mark_followers", "after"),
    (f"{_WNA16}.process_weights_after_loading", "int4:process_weights", "replace"),
    (f"{_WNA16}.apply_weights", "int4:apply_weights", "replace"),
)
GPU_HOOKS = ((f"{_WNA16_MOE}.apply_weights", "gpu_experts:apply_weights", "replace"),)
CPU_HOOKS = (
    ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.__init__", "cpu.rope:init_without_vllm", "around"),
    ("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", "cpu.rope:rope_without_scaling", "around"),
    ("sglang.srt.distributed.parallel_state.GroupCoordinator.__init__", "cpu.parallel:init_without_nccl", "around"),
    ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", "cpu.head:compute_lm_head", "around"),
    (f"{_NATIVE_ATTENTION}.init_forward_metadata", "cpu.attention:forget_plan", "before"),
    (f"{_NATIVE_ATTENTION}._run_sdpa_forward_decode", "cpu.attention:decode", "around"),
    (f"{_NATIVE_ATTENTION}._run_sdpa_forward_extend", "cpu.attention:extend", "around"),
    (
        f"{_COMPRESSED}.compressed_tensors.CompressedTensorsConfig._check_scheme_supported",
        "int4:check_scheme_supported",
        "replace",
    ),
    (
        f"{_COMPRESSED}.compressed_tensors.CompressedTensorsConfig.get_supported_act_dtypes",
        "int4:with_float32",
        "after",
    ),
    (f"{_WNA16_MOE}.apply_weights", "cpu.experts:apply_weights", "replace"),
)


def register() -> None:
    """Register the hooks of this host. Raises RuntimeError for any other version of SGLang."""
    found = metadata.version("sglang")
    if found != SGLANG_VERSION:
        raise RuntimeError(
            f"Orbit's plugin changes SGLang {SGLANG_VERSION} and found {found}; install sglang=={SGLANG_VERSION}"
        )
    if multiprocessing.parent_process() is None:
        return  # the tokenizer's process: nothing to change there, and resolving the targets would import the models
    end_if_orphaned()
    import sglang.srt.managers.scheduler as scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from orbit_cli.sglang_plugin.report import measure

    for target, ours, kind in wanted_hooks():
        module, name = ours.split(":")
        function = getattr(importlib.import_module(f"orbit_cli.sglang_plugin.{module}"), name)
        HookRegistry.register(target, function, HookType(kind))
    scheduler.Scheduler.orbit_measure = measure
    if not _has_cuda():
        from orbit_cli.sglang_plugin.cpu.mla import register_absorbed_attention

        register_absorbed_attention()


def end_if_orphaned() -> None:
    """End this scheduler if the process that started it is gone.

    SGLang asks the kernel to kill a scheduler with its parent, after imports of some seconds; a parent that was killed
    before leaves a scheduler that nobody ends. SGLang has asked by the time it calls plugins.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def wanted_hooks() -> tuple[tuple[str, str, str], ...]:
    """The hooks of this host."""
    return HOOKS + (GPU_HOOKS if _has_cuda() else CPU_HOOKS)


def applied_hooks() -> tuple[list[str], list[str]]:
    """Targets that SGLang really patched, and those of ours that it did not."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = [target for target, _, _ in wanted_hooks()]
    return sorted(set(targets) & HookRegistry._patched), sorted(set(targets) - HookRegistry._patched)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
