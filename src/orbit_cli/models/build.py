"""Building the trainer's model: transformers' architecture on the meta device, frozen modules swapped in, weights
streamed tensor by tensor from the checkpoint in the form they are stored in, adapters injected.

At no time does a dequantised copy of the base exist. Every tensor of the checkpoint is used or skipped on purpose and
every module is filled; anything else is a CheckpointError that names it. Left out: names and quirks of the families
(families.py), reading files (orbit_cli.quantization.checkpoint).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from orbit_cli.adapters.inject import inject
from orbit_cli.errors import CheckpointError
from orbit_cli.models.families import EXPERT, Family, family_of
from orbit_cli.models.frozen import FrozenExperts, FrozenLinear, own
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
    family = family_of(reader.config)
    config = _transformers_config(family, reader.config)
    module = _empty_model(config)
    linears, experts = _swap(module)
    _Filler(module, linears, experts, reader, family, device, dtype).run()
    _finish(module, config, device)
    bank = inject(
        {family.prefix + path: m for path, m in linears.items()},
        {family.prefix + path: m for path, m in experts.items()},
        spec,
        layers=layers,
        device=device,
        seed=seed,
    )
    return TrainerModel(module, bank, device=device, dtype=dtype)


def _transformers_config(family: Family, raw: dict) -> PretrainedConfig:
    fields = family.text_config(raw)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.attention_dropout = 0.0  # dropout would move the log-probs that importance ratios are made of
    config.use_cache = False
    return config


def _empty_model(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _swap(module: nn.Module) -> tuple[dict[str, FrozenLinear], dict[str, FrozenExperts]]:
    """Replace every linear of the decoder and every fused experts module; returns them by transformers' path."""
    linears, experts = {}, {}
    for path, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and child is not module.get_output_embeddings():
            linears[path] = FrozenLinear(child.in_features, child.out_features, bias=child.bias is not None)
            module.set_submodule(path, linears[path])
        elif path.endswith(".mlp.experts"):
            count, twice, hidden = child.gate_up_proj.shape
            experts[path] = FrozenExperts(count, hidden, twice // 2)
            module.set_submodule(path, experts[path])
    return linears, experts


class _Filler:
    """One pass over the checkpoint's tensors."""

    def __init__(
        self,
        module: nn.Module,
        linears: dict[str, FrozenLinear],
        experts: dict[str, FrozenExperts],
        reader: CheckpointReader,
        family: Family,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module, self.linears, self.experts = module, linears, experts
        self.reader, self.family, self.device, self.dtype = reader, family, device, dtype
        self.plain = {*dict(module.named_parameters()), *dict(module.named_buffers())}  # names still to be filled
        self.tied = module.config.tie_word_embeddings
        self.done: set[str] = set()  # linears and experts' linears already taken, by path

    def run(self) -> None:
        layers = self.module.config.num_hidden_layers
        for stored in self.reader.names():
            if not self.family.skips(stored, layers):
                self._take(stored)
        self._check_complete()

    def _take(self, stored: str) -> None:
        prefix = self.family.prefix
        name = stored.removeprefix(prefix)
        path, _, leaf = name.rpartition(".")
        expert = EXPERT.match(path)
        if not stored.startswith(prefix):
            self._unknown(stored)
        elif path in self.done and leaf != "bias":
            return
        elif expert and expert["module"] in self.experts:
            self._take_expert(path, expert["module"], int(expert["expert"]), expert["projection"])
        elif path in self.linears:
            self._take_linear(path, leaf)
        elif name == "lm_head.weight" and self.tied:
            return  # a stored copy of the embeddings
        elif name in self.plain:
            self._take_plain(name)
        else:
            self._unknown(stored)

    def _unknown(self, stored: str) -> None:
        raise CheckpointError(
            f"{self.reader.path} has a tensor {stored} that {self.module.config.model_type} has no place for; "
            "use a checkpoint of this architecture with at most its decoder's linears quantised"
        )

    def _take_linear(self, path: str, leaf: str) -> None:
        linear = self.linears[path]
        if leaf == "bias" and not linear.has_bias:
            self._unknown(self.family.prefix + path + ".bias")
        if leaf == "bias":
            linear.bias = own(self.reader.tensor(self.family.prefix + path + ".bias"), self.device, self.dtype)
            return
        value = self.reader.linear(self.family.prefix + path)
        self._check_shape(path, tuple(value.shape), (linear.out_features, linear.in_features))
        linear.fill(value, self.device, self.dtype)
        self.done.add(path)

    def _take_expert(self, path: str, module: str, expert: int, projection: str) -> None:
        experts = self.experts[module]
        value = self.reader.linear(self.family.prefix + path)
        shape = (experts.hidden, experts.intermediate)
        self._check_shape(path, tuple(value.shape), shape if projection == "down_proj" else shape[::-1])
        if expert >= experts.experts:
            self._unknown(self.family.prefix + path)
        experts.fill(expert, projection, value, self.device, self.dtype)
        self.done.add(path)

    def _take_plain(self, name: str) -> None:
        value = self.reader.tensor(self.family.prefix + name)
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        self._check_shape(name, tuple(value.shape), tuple(getattr(owner, leaf).shape))
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(own(value, self.device, self.dtype), requires_grad=False)
        else:
            # Router biases decide which experts run: transformers and the engine keep them in float32.
            owner._buffers[leaf] = own(value, self.device, torch.float32)
        self.plain.discard(name)

    def _check_shape(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise CheckpointError(
                f"{self.family.prefix}{name} has shape {list(found)} in {self.reader.path}, but config.json makes it "
                f"{list(wanted)}; the files belong to different models"
            )

    def _check_complete(self) -> None:
        missing = [path for path, linear in self.linears.items() if not linear.filled]
        missing += [path for path, experts in self.experts.items() if not experts.filled]
        # Rotary tables are computed, and a tied lm_head is the embeddings: neither is in a checkpoint.
        missing += sorted(n for n in self.plain if "rotary_emb" not in n and not (self.tied and n == "lm_head.weight"))
        if missing:
            raise CheckpointError(
                f"{self.reader.path} lacks {self.family.prefix}{missing[0]} (and {len(missing) - 1} more); "
                "the checkpoint is incomplete, copy or convert it again"
            )


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
