"""Rotary embedding without vllm on a host without an accelerator.

RotaryEmbedding.__init__ imports vllm's kernel whenever no accelerator was found, although on such a host the operator
dispatches to its native form and never calls it. The import is guarded by the module flag `_is_cpu`, which nothing else
in that module reads (layers/rotary_embedding/base.py, SGLang 0.5.17).
"""

from __future__ import annotations


def init_without_vllm(original, self, *args, **kwargs):
    """Around RotaryEmbedding.__init__: the flag is up while it runs."""
    from sglang.srt.layers.rotary_embedding import base

    saved = base._is_cpu
    base._is_cpu = True
    try:
        return original(self, *args, **kwargs)
    finally:
        base._is_cpu = saved
