"""PEFT's layout of LoRA on fused experts (`target_parameters`), taken apart into one adapter per expert.

PEFT 0.21 stores, for E experts of rank r, A [E*r, in] expert by expert and B [out, E*r] with the expert fastest:
delta W_e = s B[:, e::E] A[e*r : (e+1)*r]. Reading B expert by expert gives each expert another one's columns. Keys do
not name the parameter: `experts.base_layer.lora_A` is the inner wrapper (gate_up_proj), `experts.lora_A` the outer
(down_proj). gate and up share A there; here each gets a copy.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from orbit_cli.adapters.sites import AdaptedTensor
from orbit_cli.errors import CheckpointError


def is_fused(path: str) -> bool:
    """Whether a module path (without lora_A.weight) is one of PEFT's wrappers around fused experts."""
    return path.endswith((".mlp.experts", ".mlp.experts.base_layer"))


def split_fused_experts(tensors: dict[str, Tensor], sites: list[AdaptedTensor], folder: Path) -> dict[str, Tensor]:
    """Replace fused expert tensors by `<module>.<e>.<projection>.lora_A.weight` and so on; others stay as they are."""
    result = {name: tensor for name, tensor in tensors.items() if not is_fused(name.rsplit(".", 2)[0])}
    for path in sorted({name.rsplit(".", 2)[0] for name in tensors} - {name.rsplit(".", 2)[0] for name in result}):
        a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
        module = path.removesuffix(".base_layer")
        own = {site.projection: site for site in sites if site.experts and site.module == module}
        names = _projections(own, a, b)
        if not names:
            raise CheckpointError(
                f"{folder} adapts the experts {module} with A {list(a.shape)} and B {list(b.shape)}, which fits no "
                "adapted expert projection of this run; set adapter.expert_targets and adapter.rank as in its config"
            )
        for row, projection in enumerate(names):
            site = own[projection]
            rank, rows = site.shapes["lora_A"][0], site.out_features
            for expert, target in enumerate(site.paths):
                result[f"{target}.lora_A.weight"] = a[expert * rank : (expert + 1) * rank]
                result[f"{target}.lora_B.weight"] = b[row * rows : (row + 1) * rows, expert :: site.experts]
    return result


def _projections(own: dict[str, AdaptedTensor], a: Tensor, b: Tensor) -> tuple[str, ...]:
    """Which of the run's projections a fused pair holds, by its shapes; gate rows come before up rows."""
    for names in (("gate_proj", "up_proj"), ("down_proj",)):
        if all(name in own for name in names):
            site = own[names[0]]
            total = site.experts * site.shapes["lora_A"][0]
            if a.shape == (total, site.in_features) and b.shape == (len(names) * site.out_features, total):
                return names
    return ()
