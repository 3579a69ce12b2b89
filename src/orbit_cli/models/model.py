"""TrainerModel: a frozen base with adapters, seen from the trainer: log-probs in, gradients of the adapter out.

Left out: how it is built (build.py), the softmax (orbit_cli.trainer.logprobs) and the loss.

Shape letters: B sequences, T their padded length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from orbit_cli.adapters.bank import AdapterBank
from orbit_cli.adapters.bundle import checksum
from orbit_cli.adapters.sites import AdaptedTensor
from orbit_cli.models.frozen import FrozenExperts, FrozenLinear
from orbit_cli.models.layout import Cost, plan
from orbit_cli.trainer.logprobs import token_logprobs


class TrainerModel:
    """`module` is transformers' causal LM with frozen modules, `bank` the adapter's numbers, `adapted` its receipt."""

    def __init__(self, module: nn.Module, bank: AdapterBank, *, device: torch.device, dtype: torch.dtype) -> None:
        self.module = module
        self.bank = bank
        self.device = device
        self.dtype = dtype
        self.cost = _cost(module)

    @property
    def adapted(self) -> list[AdaptedTensor]:
        """Every adapted tensor with its shapes and counts, for the receipt."""
        return self.bank.sites

    def logprobs(
        self,
        token_ids: Tensor,
        lengths: Tensor,
        mask: Tensor,
        *,
        temperature: float,
        chunk: int,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token t | tokens < t) of the tempered softmax, float32 [B, T], exactly 0 where `mask` is false.

        token_ids [B, T] int64 right-padded, lengths [B], mask [B, T] bool of scored tokens (never the first). Samples
        of one prompt in the same call share its computation (layout.py); padding and sharing do not change results.
        """
        layout = plan(token_ids.to(self.device), lengths, mask, self.cost)
        hidden = self._hidden(layout.input_ids, layout.position_ids, layout.attention_mask)  # [R * S, H]
        scores, entropies = token_logprobs(
            hidden[layout.source], self.module.lm_head.weight, layout.targets, temperature, chunk, with_entropy
        )
        index = (layout.sequence, layout.position)
        blank = torch.zeros(token_ids.shape, dtype=torch.float32, device=self.device)  # [B, T]
        logprobs = blank.index_put(index, scores)
        return logprobs, blank.index_put(index, entropies) if with_entropy else None

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        decoder = self.module.model
        output = decoder(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)

    def disabled(self) -> AbstractContextManager[None]:
        """Adapters off: bitwise the base, the reference policy. Use it without gradients."""
        return self.bank.disabled()

    def enable_checkpointing(self) -> None:
        """Recompute each decoder layer in the backward pass instead of keeping its activations; same gradients."""
        self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.module.train()  # transformers recomputes in training mode only; there is no dropout that this would start

    def choose_experts(self, path: str, chunk_bytes: int) -> None:
        """How routed experts are multiplied, and the bytes of decoded experts at a time: see `frozen_experts`."""
        for module in self.module.modules():
            if isinstance(module, FrozenExperts):
                module.path, module.chunk_bytes = path, chunk_bytes

    def checksum(self) -> str:
        """sha256 over every frozen tensor as it is held: equal before and after training."""
        return checksum(dict(self._frozen()))

    def memory(self) -> dict[str, int]:
        """Bytes by category: base_packed (quantised weights and scales), base_plain, adapter, adapter_grads."""
        total = sum(_nbytes(t) for _, t in self._frozen())
        packed = sum(
            _nbytes(t)
            for m in self.module.modules()
            if isinstance(m, FrozenLinear | FrozenExperts) and m.fmt != "bf16"
            for name, t in m.named_buffers(recurse=False)
            if name != "bias"
        )
        return {"base_packed": packed, "base_plain": total - packed, **self.bank.memory()}

    def held(self) -> list[Tensor]:
        """What is in memory whether a step runs or not: the base, and the adapter as it is multiplied."""
        return [*(tensor for _, tensor in self._frozen()), *(part.compute for part in self.bank.parts.values())]

    def _frozen(self) -> list[tuple[str, Tensor]]:
        return [*self.module.named_parameters(), *self.module.named_buffers()]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cost(module: nn.Module) -> Cost:
    """Floating-point operations of one token, and of one more token in its row, in one forward pass."""
    config = module.config
    weights = sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, FrozenLinear))
    per_token = getattr(config, "num_experts_per_tok", 0)
    weights += sum(3 * m.hidden * m.intermediate * per_token for m in module.modules() if isinstance(m, FrozenExperts))
    key_width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    width = config.num_attention_heads * (key_width or config.hidden_size // config.num_attention_heads)
    return Cost(token=2.0 * weights, pair=4.0 * width * config.num_hidden_layers)
