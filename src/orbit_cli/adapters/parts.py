"""The flat storage of one kind of adapter tensor over the whole model: master parameter, compute copy, gradient buffer.

A part is all rotations of an OFT run, or all A (or all B) of a LoRA run. `master` is float32 and belongs to the
optimiser. `compute` holds in BF16 what is multiplied by and shipped; the leaves that the modules use are views of it,
and their `.grad` are views of `grad`, which is float32, so that one pass over flat memory builds or differentiates the
adapter of the whole model. Left out: which kind has which parts (bank.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from orbit_cli.adapters.sites import AdaptedTensor

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Compute elements built at a time; bounds the transient memory of the series. On a CPU 2^18 keeps it in the cache:
4,680 blocks of 32 take 66 ms to build and 226 ms to differentiate (2^22: 169 and 383; one AVX2 core)."""


class Part:
    """One kind of adapter tensor of a run. `build` maps master rows to compute rows; None means the identity."""

    def __init__(
        self,
        name: str,
        state_name: str,
        sites: list[AdaptedTensor],
        master_rows: Tensor,
        row_shape: tuple[int, ...],
        build: Callable[[Tensor], Tensor] | None,
        device: torch.device,
    ) -> None:
        """master_rows [rows, ...] float32, rows of all sites in order; row_shape: of one compute row."""
        self.name = name
        self.state_name = state_name
        self.sites = sites
        self.build = build
        self.master = nn.Parameter(master_rows.to(device))
        self.master.grad = torch.zeros_like(self.master)
        self.compute = torch.zeros(len(master_rows), *row_shape, dtype=torch.bfloat16, device=device)
        self.grad = torch.zeros_like(self.compute, dtype=torch.float32)
        row_elements = max(self.compute[:1].numel(), 1)
        self._chunk = max(CHUNK_ELEMENTS[device.type] // row_elements, 1)
        self._spans = _row_spans(sites, name, row_elements)
        self.leaves = [self._leaf(index) for index in range(len(sites))]

    def _leaf(self, index: int) -> Tensor:
        """The tensor that a module multiplies by: [*shape], or [experts, *shape]; gradients land in `self.grad`."""
        site = self.sites[index]
        shape = ((site.experts,) if site.experts else ()) + site.shapes[self.name]
        start, stop = self._spans[index]
        leaf = self.compute[start:stop].view(shape).detach().requires_grad_()
        leaf.grad_dtype = torch.float32
        leaf.grad = self.grad[start:stop].view(shape)
        return leaf

    def chunks(self) -> list[slice]:
        """Rows that are built at a time."""
        return [slice(start, start + self._chunk) for start in range(0, len(self.master), self._chunk)]

    @torch.no_grad()
    def materialize(self) -> None:
        """Master -> compute, in float32, rounded to BF16 once."""
        for rows in self.chunks():
            built = self.master[rows] if self.build is None else self.build(self.master[rows])
            self.compute[rows].copy_(built)

    def pull_back(self) -> None:
        """Gradient of the compute copy -> of the master; rounding counts as the identity (straight through)."""
        if self.build is None:
            self.master.grad.copy_(self.grad)
            return
        for rows in self.chunks():
            master = self.master[rows].detach().requires_grad_()
            with torch.enable_grad():
                built = self.build(master)
            (gradient,) = torch.autograd.grad(built, master, self.grad[rows])
            self.master.grad[rows].copy_(gradient)

    def zero_grad(self) -> None:
        """Zero both gradients in place: the leaves' `.grad` stay views of the buffer."""
        self.grad.zero_()
        if self.master.grad is None:  # an optimiser's zero_grad(set_to_none=True) drops it
            self.master.grad = torch.zeros_like(self.master)
        self.master.grad.zero_()

    def rounded(self) -> dict[str, Tensor]:
        """The shipped tensors: path.name -> CPU bfloat16, all views of one fresh buffer."""
        flat = self.compute.cpu()
        if flat.data_ptr() == self.compute.data_ptr():
            flat = flat.clone()
        return {f"{path}.{self.name}": view for path, view in self._per_path(flat, compute=True)}

    def state(self) -> dict[str, Tensor]:
        """The master: path.state_name -> float32 view."""
        return {f"{path}.{self.state_name}": view for path, view in self._per_path(self.master.detach(), compute=False)}

    def _per_path(self, flat: Tensor, *, compute: bool) -> list[tuple[str, Tensor]]:
        pairs = []
        for site, (start, stop) in zip(self.sites, self._spans, strict=True):
            rows = (stop - start) // max(site.experts, 1)
            for position, path in enumerate(site.paths):
                view = flat[start + position * rows : start + (position + 1) * rows]
                shape = site.shapes[self.name] if compute or self.build is None else view.shape
                pairs.append((path, view.view(shape)))
        return pairs


def _row_spans(sites: list[AdaptedTensor], name: str, row_elements: int) -> list[tuple[int, int]]:
    """[start, stop) rows of each site, experts of a site adjacent."""
    spans, start = [], 0
    for site in sites:
        elements = max(site.experts, 1) * torch.Size(site.shapes[name]).numel()
        spans.append((start, start + elements // row_elements))
        start = spans[-1][1]
    return spans
