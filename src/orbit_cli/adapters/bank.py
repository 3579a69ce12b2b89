"""AdapterBank: every trainable number of a run, in a few flat float32 tensors.

A step is: materialize() after each optimiser step -> forward and backward of any number of micro-batches, which
accumulate into one float32 buffer -> pull_back() once -> optimiser -> zero_grad(). The modules hold leaves of the bank
(see parts.py); what they multiply by is bit for bit what `version()` ships to the engine.
Left out: which modules are adapted (inject.py) and the optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from orbit_cli.adapters import lora, oft
from orbit_cli.adapters.bundle import make_version
from orbit_cli.adapters.parts import Part
from orbit_cli.adapters.sites import AdaptedTensor
from orbit_cli.errors import CheckpointError
from orbit_cli.types import AdapterSpec, AdapterVersion


class AdapterBank:
    """Owner of the adapter's parameters. `enabled` is read by every adapted module at each forward."""

    def __init__(self, spec: AdapterSpec, sites: list[AdaptedTensor], *, device: torch.device, seed: int) -> None:
        self.spec = spec
        self.sites = sites
        self.enabled = True
        self.parts: dict[str, Part] = {part.name: part for part in PARTS[spec.kind](spec, sites, device, seed)}
        self.materialize()

    def leaf(self, name: str, site: int) -> Tensor:
        """What the module of site number `site` multiplies by: oft_R, lora_A or lora_B; gradients accumulate in it."""
        return self.parts[name].leaves[site]

    def materialize(self) -> None:
        """Rebuild the BF16 compute copies from the master. Never between a forward and its backward."""
        for part in self.parts.values():
            part.materialize()

    def pull_back(self) -> None:
        """Accumulated gradients of the compute copies -> `.grad` of parameters(), once per optimiser step."""
        for part in self.parts.values():
            part.pull_back()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts.values():
            part.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        """The float32 master parameters: OFT one [blocks, b(b-1)/2]; LoRA one flat A and one flat B."""
        return [part.master for part in self.parts.values()]

    def named_state(self) -> dict[str, Tensor]:
        """Checkpoint of the master: path.oft_skew [n, p], or path.lora_A [r, in] and path.lora_B [out, r]; views."""
        return {name: tensor for part in self.parts.values() for name, tensor in part.state().items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Copy a named_state() in, bit for bit, and materialize. Raises CheckpointError naming what does not fit."""
        own = self.named_state()
        for complaint, names in (("lacks", own.keys() - state.keys()), ("has the unknown", state.keys() - own.keys())):
            if names:
                raise CheckpointError(
                    f"the adapter state {complaint} {sorted(names)[0]} (and {len(names) - 1} more); "
                    "set adapter.targets, expert_targets, expert_width and layers to those it was trained with"
                )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"{name} has shape {list(state[name].shape)} in the adapter state but {list(tensor.shape)} in this "
                    "model; set the block size or rank it was trained with"
                )
            tensor.copy_(state[name])
        self.materialize()

    @torch.no_grad()
    def randomize(self, seed: int, scale: float) -> None:
        """Move away from the identity: skew vectors (LoRA: B) drawn from N(0, scale^2). For parity tests."""
        generator = torch.Generator().manual_seed(seed)
        for name, part in self.parts.items():
            if name != "lora_A":  # A is random from the start, and B decides whether it acts
                part.master.copy_(torch.randn(part.master.shape, generator=generator) * scale)
        self.materialize()

    def version(self, number: int) -> AdapterVersion:
        """The present policy as the bytes that both sides multiply by."""
        tensors = {name: t for part in self.parts.values() for name, t in part.rounded().items()}
        return make_version(number, self.spec, tensors)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Adapters off: the model is bitwise the base, which is the reference policy."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """adapter_norm: 2-norm of the master. OFT also adapter_lambda_max (must stay below 1) and
        adapter_orthogonality_error: the largest ||R R^T - I||_2 of the series, before rounding to BF16."""
        metrics = {"adapter_norm": float(torch.stack([p.norm() for p in self.parameters()]).norm())}
        if self.spec.kind == "oft":
            part = self.parts["oft_R"]
            rows = part.chunks()
            metrics["adapter_lambda_max"] = max(oft.max_lambda(part.master[r], self.spec.block_size) for r in rows)
            errors = (oft.max_orthogonality_error(part.build(part.master[r])) for r in rows)
            metrics["adapter_orthogonality_error"] = max(errors)
        return metrics

    @torch.no_grad()
    def orthogonality_by_tensor(self) -> dict[str, float]:
        """OFT: ||R R^T - I||_2 of each adapted linear, largest over its blocks; slow, for reports. LoRA: empty."""
        if self.spec.kind != "oft":
            return {}
        build = self.parts["oft_R"].build
        return {
            name.removesuffix(".oft_skew"): oft.max_orthogonality_error(build(vectors))
            for name, vectors in self.named_state().items()
        }

    def memory(self) -> dict[str, int]:
        """Bytes of the adapter (master and compute copy) and of its gradients."""
        masters = [p for p in self.parameters()]
        return {
            "adapter": _nbytes([*masters, *(part.compute for part in self.parts.values())]),
            "adapter_grads": _nbytes(
                [*(p.grad for p in masters if p.grad is not None), *(part.grad for part in self.parts.values())]
            ),
        }


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _oft_parts(spec: AdapterSpec, sites: list[AdaptedTensor], device: torch.device, seed: int) -> list[Part]:
    """Zero skew vectors: every R is exactly the identity at the start (seed unused)."""
    b = spec.block_size
    blocks = sum(max(site.experts, 1) * site.shapes["oft_R"][0] for site in sites)
    build = partial(oft.cayley_neumann, block_size=b, terms=spec.neumann_terms)
    master = torch.zeros(blocks, b * (b - 1) // 2)
    return [Part("oft_R", "oft_skew", sites, master, (b, b), build, device)]


def _lora_parts(spec: AdapterSpec, sites: list[AdaptedTensor], device: torch.device, seed: int) -> list[Part]:
    """A as PEFT starts it, from one seeded generator in site order; B zero."""
    generator = torch.Generator().manual_seed(seed)
    shapes_a = [((max(site.experts, 1),) + site.shapes["lora_A"]) for site in sites]
    elements_b = sum(max(site.experts, 1) * torch.Size(site.shapes["lora_B"]).numel() for site in sites)
    master_a = torch.cat([lora.init_a(shape, generator).flatten() for shape in shapes_a])
    return [
        Part("lora_A", "lora_A", sites, master_a, (), None, device),
        Part("lora_B", "lora_B", sites, torch.zeros(elements_b), (), None, device),
    ]


PARTS = {"oft": _oft_parts, "lora": _lora_parts}
