"""A training step of a real model without a GPU and without arithmetic: every tensor that a GPU would hold is counted.

The model is built and stepped with torch's fake tensors, which have shapes, types and storages and no data. Where our
code asks whether it is on a GPU it is told so, and Triton kernels are replaced by nothing: their outputs are allocated
by the Python around them, which runs. torch's fused attention is the one that takes a mask on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from orbit_cli.adapters import parts
from orbit_cli.adapters.spec import spec_from_config
from orbit_cli.config.schema import OrbitConfig
from orbit_cli.models.build import build_model
from orbit_cli.planner.gpu_training import SERIES_CHUNK
from orbit_cli.quantization.base_model import prepare_base
from orbit_cli.quantization.checkpoint import CheckpointReader
from orbit_cli.trainer import logprobs
from orbit_cli.trainer.optimizer import make_optimizer
from orbit_kernels import expert_layer, grouped, linear

OPERATORS = {"expert_layer": expert_layer._forward_operator, "expert_layer_gradient": expert_layer._gradient_operator}


@dataclass(kw_only=True, slots=True)
class Step:
    """Bytes beyond what lies there between steps."""

    kept: int = 0  # after the forward pass
    logits: int = 0  # at the largest while log-probs are formed
    backward: int = 0  # at the largest in the backward pass
    series: int = 0  # at the largest while gradients go back through the rotations
    update: int = 0  # at the largest in the optimiser's step
    moments: int = 0  # what the optimiser's first step leaves
    materialised: int = 0  # at the largest while rotations are built

    @property
    def peak(self) -> int:
        return max(self.logits, self.backward, self.series, self.update - self.moments)


def step(config: OrbitConfig, tokens: int, scored: int) -> Step:
    """One micro-batch of one row with a mask, and one update, with the base that `prepare_base` makes."""
    base = prepare_base(config.model, config.quantization, lambda text: None)
    counter = _Counter()
    with _imagined(), FakeTensorMode(allow_non_fake_inputs=True), counter:
        model = build_model(
            base, spec_from_config(config.adapter), layers=[], device="cpu", dtype=torch.bfloat16, seed=0
        )
        model.choose_experts("kernels", config.trainer.expert_chunk_bytes)
        if config.trainer.activation_checkpointing:
            model.enable_checkpointing()
        optimizer = make_optimizer(model.bank.parameters(), config.trainer)
        optimizer.defaults["foreach"] = optimizer.param_groups[0]["foreach"] = True  # torch's choice on a GPU
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        found, between = Step(), counter.settle()
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
        hidden = model._hidden(ids, ids, mask)
        found.kept = counter.settle() - between
        targets = torch.zeros(scored, dtype=torch.int64)
        chunk = config.trainer.logprob_chunk_tokens
        scores, entropy = logprobs.token_logprobs(
            hidden[targets], model.module.lm_head.weight, targets, 1.0, chunk, True
        )
        del hidden
        found.logits = counter.peak - between
        counter.settle()
        scores.sum().backward()
        found.backward = counter.peak - between
        del scores, entropy, mask
        between = counter.settle()
        model.bank.pull_back()
        found.series = counter.peak - between
        before = counter.settle()
        optimizer.step()
        found.update = counter.peak - before
        found.moments = counter.settle() - before
        before = counter.settle()
        model.bank.materialize()
        found.materialised = counter.peak - before
    return found


class _Counter(TorchDispatchMode):
    """Bytes of live storages, now and at the most since `settle`."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def settle(self) -> int:
        gc.collect()
        self.peak = self.now
        return self.now

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operator = OPERATORS.get(function._schema.name.rpartition("::")[2])
        if operator is not None:
            with self:  # its body, whose tensors count too
                return operator._init_fn(*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self.live:
            self.live[key] = nbytes
            self.now += nbytes
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


class _Nothing:
    """kernel[grid](...): launches nothing."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


@contextlib.contextmanager
def _imagined() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        products = {"grouped_forward": _forward, "grouped_input_gradient": _gradient}
        for module in [module for name, module in sys.modules.items() if name.startswith("orbit_kernels.")]:
            for name, value in list(vars(module).items()):
                if isinstance(value, KernelInterface):
                    patch.setattr(module, name, _Nothing())
                elif name in products:
                    patch.setattr(module, name, products[name])
        patch.setattr(grouped, "unsupported", lambda weight: None)
        patch.setattr(linear, "_kernels_take", lambda x, *weight: linear._stacked(*weight))
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        patch.setattr(logprobs, "_log_softmax", _log_softmax)
        patch.setitem(parts.CHUNK_ELEMENTS, "cpu", SERIES_CHUNK)
        for name in ("tensor", "linear"):
            patch.setattr(CheckpointReader, name, _really(getattr(CheckpointReader, name)))
        yield


def _really(read):
    """Files are read as they are."""

    def reading(*args):
        with unset_fake_temporarily():
            return read(*args)

    return reading


def _forward(x, weight, offsets, **_):
    return x.new_empty(x.shape[-2], weight.shape[1])


def _gradient(dy, weight, offsets, *, split=False, **_):
    shape = (dy.shape[-2], weight.shape[2])
    return dy.new_empty((weight.parts, *shape) if split else shape)


def _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, **_):
    """What torch does with a boolean mask on a GPU."""
    bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]


def _log_softmax(hidden, weight, temperature):
    """The GPU's branch: BF16 products with float32 results."""
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    return logits.sub_(torch.logsumexp(logits, 1, keepdim=True))
