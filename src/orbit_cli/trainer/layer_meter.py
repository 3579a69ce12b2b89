"""What each decoder layer costs in a training step: milliseconds forward and backward, and MiB kept between the two.

Routed experts are measured inside their layer, too. A few early steps are measured, by hooks that are gone afterwards,
and the one with the least time a token is reported: kernels are compiled in the others. Recomputed activations count as
backward. Left out: the lm_head and the loss, which belong to no layer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from orbit_cli.models.frozen import FrozenExperts
from orbit_cli.models.model import TrainerModel

MEASURED_STEPS = 3


class LayerMeter:
    """Measures the first steps of a training that have a gradient.

    >>> with meter.step():
    ...     optimise(...)
    >>> meter.record  # None, until MEASURED_STEPS steps were measured or `finish` was called
    {"tokens": 2816, "layers": [{"forward_ms": 1.9, "backward_ms": 4.1, "kept_mib": 12.5, "experts_forward_ms": ...}]}
    """

    def __init__(self, model: TrainerModel) -> None:
        self._decoder, self._device = model.module.model, model.device
        self._held = {tensor.untyped_storage().data_ptr() for tensor in model.held()}
        self._seen: list[dict] = []
        self.record: dict | None = None  # times are sums over a step's micro-batches, kept_mib their maximum

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the optimiser steps of one batch."""
        if self.record:
            yield
            return
        clock = _Clock(self._device, self._held)
        with ExitStack() as hooks:
            watches = [_watch(layer, clock, hooks) for layer in self._decoder.layers]
            hooks.callback(self._decoder.register_forward_pre_hook(clock.forward, with_kwargs=True).remove)
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if clock.backward_runs:
            layers = [{k: v for prefix, w in own.items() for k, v in w.row(prefix).items()} for own in watches]
            self._seen.append({"tokens": clock.tokens, "layers": layers})
        if len(self._seen) == MEASURED_STEPS:
            self.finish()

    def finish(self) -> None:
        """No more steps will come: `record` is the best of those that were measured, if there are any."""
        self.record = self.record or min(self._seen, key=_time_per_token, default=None)


def _time_per_token(record: dict) -> float:
    return sum(row["forward_ms"] + row["backward_ms"] for row in record["layers"]) / record["tokens"]


def _watch(layer: nn.Module, clock: _Clock, hooks: ExitStack) -> dict[str, _Watch]:
    """The layer's own watch and, under the prefix "experts_", that of its routed experts."""
    recomputes = layer.training and getattr(layer, "gradient_checkpointing", False)
    watched = {"": (layer, _Watch(clock, recomputes))}
    for module in layer.modules():
        if isinstance(module, FrozenExperts):
            watched["experts_"] = (module, _Watch(clock, recomputes, within=watched[""][1]))
    for module, watch in watched.values():
        hooks.callback(module.register_forward_pre_hook(watch.before).remove)
        hooks.callback(module.register_forward_hook(watch.after).remove)
    return {prefix: watch for prefix, (_, watch) in watched.items()}


class _Clock:
    """Moments on the device, and whether the backward pass runs (it calls modules again to recompute them)."""

    def __init__(self, device: torch.device, held: set[int]) -> None:
        self.held = held  # storages of base and adapter, which are there in any case
        self.backward_runs = False
        self.tokens = 0  # rows of the forwards with a gradient
        self._cuda = device.type == "cuda"

    def forward(self, module: nn.Module, inputs: tuple, named: dict) -> None:
        self.backward_runs = False
        if torch.is_grad_enabled():
            self.tokens += named["input_ids"].numel()

    def now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Watch:
    """One module. Its backward lasts from the gradient of its output to that of its input, or to the end."""

    def __init__(self, clock: _Clock, recomputes: bool, within: _Watch | None = None) -> None:
        self._clock, self._recomputes, self._within = clock, recomputes, within
        self._forward: list[list] = []  # [start, end]
        self._backward: list[list] = []  # [start, end], empty where no gradient arrived
        self._kept: dict[int, int] = {}  # bytes by storage, of the forward that runs
        self._most_kept = 0

    def row(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}forward_ms": _milliseconds(self._forward),
            f"{prefix}backward_ms": _milliseconds(self._backward),
            f"{prefix}kept_mib": self._most_kept / 2**20,
        }

    def before(self, module: nn.Module, inputs: tuple) -> None:
        if self._counts():
            self._kept = {}
            self._saving = None
            if self._recomputes and self._within is None:
                self._keep(inputs[0])  # all that checkpointing keeps, by hooks of its own
            elif not self._recomputes:
                self._saving = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
                self._saving.__enter__()
            self._forward.append([self._clock.now()])

    def after(self, module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        if not self._counts():
            return
        self._forward[-1].append(self._clock.now())
        if self._saving is not None:
            self._saving.__exit__()
        self._most_kept = max(self._most_kept, sum(self._kept.values()))
        result = output if isinstance(output, Tensor) else output[0]
        if result.requires_grad:
            span: list = []
            result.register_hook(functools.partial(self._start_backward, span, not inputs[0].requires_grad))
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: span.append(self._clock.now()))
            self._backward.append(span)

    def _counts(self) -> bool:
        return torch.is_grad_enabled() and not self._clock.backward_runs

    def _start_backward(self, span: list, last: bool, gradient: Tensor) -> None:
        """`last`: no gradient goes on from here, so that this backward ends with the whole one."""
        self._clock.backward_runs = True
        span.append(self._clock.now())
        if last:
            Variable._execution_engine.queue_callback(lambda: span.append(self._clock.now()))

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._clock.held:
            self._kept[storage.data_ptr()] = storage.nbytes()
            if self._within is not None:
                self._within._keep(tensor)
        return tensor.detach()  # a saved output that is kept as it is would hold its own node alive


def _milliseconds(spans: list[list]) -> float:
    whole = [span for span in spans if len(span) == 2]
    return sum(1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end) for start, end in whole)
