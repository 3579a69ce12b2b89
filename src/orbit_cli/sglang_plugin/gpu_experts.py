"""Routed experts on a GPU: the trainer's own kernels on SGLang's tensors, with or without adapters.

SGLang's Triton path keeps INT4 experts as w*_weight_packed [E, N, K/2] uint8 and w*_weight_scale [E, N, K/32], and
unquantised ones as w*_weight [E, N, K]: what orbit_kernels reads. Serving them with the kernels that the trainer
differentiates through makes both sides' numbers the same, and a batch may mix adapter versions. Nothing here asks the
host, so it is captured in CUDA graphs. Left out: expert parallelism, activations other than SwiGLU (refused).

Shape letters: T tokens, k experts per token, E experts, H hidden, I intermediate, S slots.
"""

from __future__ import annotations

from torch import Tensor, nn


def apply_weights(self, layer: nn.Module, dispatch_output):
    """Takes the place of CompressedTensorsWNA16TritonMoE.apply_weights: INT4 experts without adapters."""
    return run_experts(layer, dispatch_output, None)


def run_experts(layer: nn.Module, dispatch_output, adapted):
    """SGLang's combine input [T, H]; `adapted` is the layer's AdaptedExpertsMethod, or None for the base."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    from orbit_kernels.expert_layer import serve_expert_layer

    config, topk = layer.moe_runner_config, dispatch_output.topk_output
    if config.activation != "silu" or not config.is_gated:
        raise ValueError(f"experts with activation {config.activation} are not served; Orbit's kernels compute SwiGLU")
    w13, w2 = packed_experts(layer)
    y = serve_expert_layer(
        dispatch_output.hidden_states,
        topk.topk_ids,
        topk.topk_weights.float() * (config.routed_scaling_factor or 1.0),  # on a GPU the model leaves it to us
        w13,
        w2,
        adapter=None if adapted is None else stacked_adapters(adapted),
        token_slot=None if adapted is None else adapted.slots.token_slot,
        slots=1 if adapted is None else len(adapted.kinds),
        limit=config.swiglu_limit,
    )
    return StandardCombineInput(hidden_states=y)


def packed_experts(layer: nn.Module):
    """The layer's two stacked projections as orbit_kernels' PackedExperts; views, made once."""
    found = getattr(layer, "orbit_packed", None)
    if found is None:
        from orbit_kernels.grouped import PackedExperts, unsupported

        if hasattr(layer, "w13_weight_packed"):
            found = tuple(
                PackedExperts(packed=weight.data, scale=scale.data, fmt="int4", parts=parts)
                for weight, scale, parts in (
                    (layer.w13_weight_packed, layer.w13_weight_scale, 2),
                    (layer.w2_weight_packed, layer.w2_weight_scale, 1),
                )
            )
        else:
            found = (
                PackedExperts(packed=layer.w13_weight.data, scale=None, fmt="bf16", parts=2),
                PackedExperts(packed=layer.w2_weight.data, scale=None, fmt="bf16"),
            )
        for weight in found:
            if reason := unsupported(weight):
                raise ValueError(f"routed experts cannot be served by Orbit's kernels: {reason}")
        layer.orbit_packed = found
    return found


def stacked_adapters(adapted):
    """All slots of all experts as one stack [E * S, ...] per projection: group expert * S + slot."""
    from orbit_kernels.experts import ExpertAdapters, StackedAdapter

    def stack(name: str) -> StackedAdapter | None:
        def flat(stored: dict[str, Tensor]) -> Tensor | None:
            return stored[name].flatten(0, 1) if name in stored else None

        if name not in adapted.wanted:
            return None
        return StackedAdapter(
            rotation=flat(adapted.rotations),
            lora_a=flat(adapted.lora_a),
            lora_b=flat(adapted.lora_b),
            scaling=adapted.common_scaling,
        )

    return ExpertAdapters(gate=stack("gate_proj"), up=stack("up_proj"), down=stack("down_proj"))
