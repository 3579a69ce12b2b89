"""MLA under torch_native attention: always the absorbed form.

No handler is registered for torch_native in DeepSeek's dispatch, so it falls to the Triton rule (keys and values of the
prefill formed explicitly), while torch_native reads both from the latent cache (SGLang 0.5.17).
"""

from __future__ import annotations


def register_absorbed_attention() -> None:
    """Every batch of a DeepSeek model takes the absorbed path."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda _attention, _forward_batch: AttnForwardMethod.MLA)
