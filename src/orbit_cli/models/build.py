"""Building the trainer's model: transformers' architecture on the meta device, frozen modules swapped in, weights
streamed tensor by tensor from the checkpoint in the form they are stored in, adapters injected.

At no time does a dequantised copy of the base exist. Every tensor of the checkpoint is used or skipped on purpose and
every module is filled; anything else is a CheckpointError that names it (check.py). Left out: the architecture
(empty.py), names and quirks of the families (families.py), reading files (orbit_cli.quantization.checkpoint).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from orbit_cli.adapters.inject import inject
from orbit_cli.models.check import check_tensors
from orbit_cli.models.empty import EmptyModel, empty_model
from orbit_cli.models.families import EXPERT
from orbit_cli.models.frozen import own
from orbit_cli.models.model import TrainerModel
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.types import AdapterSpec


def build_model(
    checkpoint: Path, spec: AdapterSpec, *, layers: list[int], device: torch.device | str, dtype: torch.dtype, seed: int
) -> TrainerModel:
    """The model that is trained: frozen base from `checkpoint`, adapter of `spec` on `layers` (empty: all).

    dtype is that of the activations and of everything unquantised. Raises CheckpointError for a checkpoint that is not
    exactly this model and ConfigError for an adapter that does not fit it.
    """
    device = torch.device(device)
    reader = CheckpointReader(Path(checkpoint))
    empty = empty_model(reader)
    check_tensors(empty, reader)
    family, module, linears, experts = empty.family, empty.module, empty.linears, empty.experts
    _Filler(empty, reader, device, dtype).run()
    _finish(module, empty.config, device)
    bank = inject(
        {family.prefix + path: m for path, m in linears.items()},
        {family.prefix + path: m for path, m in experts.items()},
        spec,
        layers=layers,
        device=device,
        seed=seed,
    )
    return TrainerModel(module, bank, device=device, dtype=dtype)


class _Filler:
    """One pass over the checkpoint's tensors."""

    def __init__(self, empty: EmptyModel, reader: CheckpointReader, device: torch.device, dtype: torch.dtype) -> None:
        self.module, self.linears, self.experts, self.family = empty.module, empty.linears, empty.experts, empty.family
        self.reader, self.device, self.dtype = reader, device, dtype
        self.done: set[str] = set()  # linears and experts' linears already taken, by path

    def run(self) -> None:
        layers = self.module.config.num_hidden_layers
        for stored in self.reader.names():
            if not self.family.skips(stored, layers):
                self._take(stored.removeprefix(self.family.prefix))

    def _take(self, name: str) -> None:
        path, _, leaf = name.rpartition(".")
        expert = EXPERT.match(path)
        if path in self.done and leaf != "bias":
            return
        if expert and expert["module"] in self.experts:
            value = self.reader.linear(self.family.prefix + path)
            owner = self.experts[expert["module"]]
            owner.fill(int(expert["expert"]), expert["projection"], value, self.device, self.dtype)
            self.done.add(path)
        elif path in self.linears:
            self._take_linear(path, leaf)
        elif not (name == "lm_head.weight" and self.module.config.tie_word_embeddings):
            self._take_plain(name)

    def _take_linear(self, path: str, leaf: str) -> None:
        linear = self.linears[path]
        if leaf == "bias":
            linear.bias = own(self.reader.tensor(self.family.prefix + path + ".bias"), self.device, self.dtype)
            return
        linear.fill(self.reader.linear(self.family.prefix + path), self.device, self.dtype)
        self.done.add(path)

    def _take_plain(self, name: str) -> None:
        value = self.reader.tensor(self.family.prefix + name)
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(own(value, self.device, self.dtype), requires_grad=False)
        else:
            # Router biases decide which experts run: transformers and the engine keep them in float32.
            owner._buffers[leaf] = own(value, self.device, torch.float32)


def _finish(module: nn.Module, config: PretrainedConfig, device: torch.device) -> None:
    """What no checkpoint holds: ties, and rotary tables, which the meta device left empty."""
    for path, child in list(module.named_modules()):
        if path.endswith("rotary_emb"):
            module.set_submodule(path, type(child)(config=config, device=device))
    if config.tie_word_embeddings:
        module.lm_head.weight = module.get_input_embeddings().weight
    module.requires_grad_(False)
    module.eval()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert not tensor.is_meta, f"{name} was never filled"
