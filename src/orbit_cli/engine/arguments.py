"""From Orbit's config to SGLang's ServerArgs: the one place that knows SGLang's argument names.

Runs without importing SGLang or torch; names in `engine.extra` are checked in the engine's own process, where SGLang
is loaded anyway (`check_extra`).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from orbit_cli.config.schema.system import Device, EngineConfig, HardwareConfig
from orbit_cli.errors import ConfigError

# SGLang's own choices (0.5.17); a test compares them.
ATTENTION_BACKENDS = (
    "triton", "torch_native", "flex_attention", "dsa", "nsa", "dsv4", "compressed", "cutlass_mla", "fa3", "fa4",
    "flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "trtllm_mha", "dual_chunk_flash_attn",
    "hpc_ops", "aiter", "wave", "intel_amx", "ascend", "intel_xpu",
)  # fmt: skip
MOE_RUNNER_BACKENDS = (
    "auto", "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "experimental_sgl_trtllm",
    "flashinfer_trtllm_routed", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "cutlass", "aiter",
    "marlin", "humming", "experimental_sgl_marlin", "hpc_ops",
)  # fmt: skip
CPU_TOKENS = 65536  # KV cache on a CPU unless the config says otherwise

# Arguments that Orbit's own design fixes: another value would break adapters, stamps or seeds without a word.
FIXED = ("enable_lora", "lora_paths", "max_loaded_loras", "lora_target_modules", "max_lora_rank", "max_loras_per_batch",
         "skip_tokenizer_init", "model_path", "dtype", "sampling_backend")  # fmt: skip


def server_arguments(
    base: Path, engine: EngineConfig, hardware: HardwareConfig, model_dtype: str, seed: int
) -> dict[str, Any]:
    """Keyword arguments of SGLang's ServerArgs. Raises ConfigError for what `check_engine` refuses."""
    check_engine(engine)
    arguments = {
        "model_path": str(base),
        "dtype": model_dtype,
        "device": str(hardware.device),
        "tp_size": engine.tensor_parallel,
        "random_seed": seed,
        "log_level": engine.log_level,
        "skip_tokenizer_init": True,  # token-in, token-out
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "moe_runner_backend": engine.moe_runner_backend,
        "disable_shared_experts_fusion": True,  # a fused shared expert would hide from its adapters
        "sleep_on_idle": True,  # trainer and engine share the cores
        "schedule_policy": "lpm",  # of a group's samples the first fills the prefix cache, the rest use it
        # SGLang's adapter control plane; what its adapters are, the plugin decides.
        "enable_lora": True,
        "max_lora_rank": 1,
        "lora_target_modules": ["q_proj"],
        "max_loras_per_batch": engine.live_versions + 1,
        "lora_backend": "torch_native" if hardware.device is Device.cpu else "triton",
    }
    arguments |= _cpu(engine) if hardware.device is Device.cpu else _cuda(engine)
    return arguments | dict(engine.extra)


def check_engine(engine: EngineConfig) -> None:
    """Refuse what SGLang does not know, or Orbit sets itself, before an engine is started. Raises ConfigError."""
    taken = sorted(set(engine.extra) & set(FIXED))
    if taken:
        raise ConfigError(
            f"engine.extra.{taken[0]} is set, but Orbit sets {taken[0]} itself for its adapters; leave it out"
        )
    for name, known, usual in (
        ("attention_backend", ATTENTION_BACKENDS, "null"),
        ("moe_runner_backend", MOE_RUNNER_BACKENDS, "triton"),
    ):
        value = getattr(engine, name)
        if value is not None and value not in known:
            near = difflib.get_close_matches(value, known, n=3, cutoff=0.5)
            hint = f"nearest are {', '.join(near)}" if near else f"it has {', '.join(known)}"
            raise ConfigError(
                f"engine.{name}={value} is none of SGLang's; {hint}; set engine.{name}={usual} if in doubt"
            )


def _cpu(engine: EngineConfig) -> dict[str, Any]:
    return {
        "attention_backend": engine.attention_backend or "torch_native",
        "max_total_tokens": engine.max_total_tokens or CPU_TOKENS,
        "mem_fraction_static": 0.2,  # only a bound for max_total_tokens here
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,  # no second device to overlap with
    }


def _cuda(engine: EngineConfig) -> dict[str, Any]:
    largest = engine.cuda_graph_max_bs
    graphs: dict[str, Any] = {"disable_decode_cuda_graph": True}
    if largest:
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size < largest] + [largest]
        graphs = {
            "cuda_graph_bs_decode": sizes,
            "cuda_graph_max_bs_decode": largest,
        }  # few sizes: a start captures each of them
    return {
        "attention_backend": engine.attention_backend or "triton",
        "mem_fraction_static": engine.mem_fraction_static,
        "disable_prefill_cuda_graph": True,  # a prefill with adapters runs eagerly
        **graphs,
    }


def check_extra(extra: dict[str, Any], known: list[str]) -> None:
    """Refuse names in `engine.extra` that ServerArgs does not have. Raises ConfigError with the nearest names."""
    for name in extra:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"; nearest are {', '.join(nearest)}" if nearest else ""
            raise ConfigError(f"engine.extra.{name} is no argument of SGLang's ServerArgs{hint}")
