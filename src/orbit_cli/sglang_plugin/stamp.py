"""The version that sampled each token, stamped inside the engine.

After every sampling step each request gets the name of the adapter that was prepared for that forward pass; SGLang
carries `customized_info` to the response, aligned with the output tokens. SGLang's own `weight_version` is one label
read when an output is handled, and knows nothing of adapters.
"""

from __future__ import annotations

STAMP = "orbit_version"


def stamp(result, runner, logits_output, forward_batch):
    """After ModelRunner.sample: add the names, None for the base."""
    manager = getattr(runner, "lora_manager", None)
    if manager is not None and forward_batch.lora_ids is not None:
        info = dict(logits_output.customized_info or {})
        info[STAMP] = manager.version_names(forward_batch.lora_ids)
        logits_output.customized_info = info
    return result
