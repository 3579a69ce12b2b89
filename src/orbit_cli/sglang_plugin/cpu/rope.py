"""Rotary embedding on a host without an accelerator: without vllm, and for MLA models without YaRN.

RotaryEmbedding.__init__ imports vllm's kernel whenever no accelerator was found, although on such a host the operator
dispatches to its native form and never calls it. The import is guarded by the module flag `_is_cpu`, which nothing else
in that module reads (layers/rotary_embedding/base.py, SGLang 0.5.17).
"""

from __future__ import annotations

import inspect


def init_without_vllm(original, self, *args, **kwargs):
    """Around RotaryEmbedding.__init__: the flag is up while it runs."""
    from sglang.srt.layers.rotary_embedding import base

    saved = base._is_cpu
    base._is_cpu = True
    try:
        return original(self, *args, **kwargs)
    finally:
        base._is_cpu = saved


def rope_without_scaling(original, *args, **kwargs):
    """Around get_rope_cpu, which insists on DeepSeek's YaRN: a model without any scaling gets the plain embedding."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["rope_scaling"] is not None:
        return original(*args, **kwargs)
    bound.arguments.pop("device")
    return get_rope(**bound.arguments)
