"""The trainer's share of a plan: base, adapter and its state, activations, logits, decoded weights. No torch.

Counts what orbit_cli.trainer, adapters and models do: master weights, both gradients and Adam's moments in float32; the
multiplied copy in BF16; frozen weights in their stored form; logits of trainer.logprob_chunk_tokens tokens at a
time. On a CPU what comes and goes is summed, and weights are decoded one linear (or expert) at a time; what a GPU does
is in gpu_training.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import AdapterKind
from orbit_cli.config.schema.memory import TrainerLayout
from orbit_cli.planner.adapters import Site, on_gpu
from orbit_cli.planner.gpu_training import Moments
from orbit_cli.planner.layout import Layout
from orbit_cli.planner.lengths import Lengths
from orbit_cli.planner.model import Model
from orbit_cli.planner.part import BASE, Part, Side, count
from orbit_cli.planner.shape import ModelShape
from orbit_cli.planner.storage import Held, largest_unit

SERIES_CHUNK = 1 << 18  # numbers of rotations built at a time on a CPU: adapters/parts.py
LOGIT_COPIES = 3  # log-probs, their exponential and the product of both exist together


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """What the trainer's parts depend on."""

    config: OrbitConfig
    model: Model
    layout: Layout
    lengths: Lengths
    sites: list[Site]  # what the adapter sits on
    dtype_bytes: int  # of activations and of what no number format stores

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def resident(self) -> list[Part]:
        """What lies there in every phase."""
        return [*self.base(), *self.adapter()]

    def base(self) -> list[Part]:
        """The frozen base by category; multi-token prediction is not loaded."""
        return [
            base_part(Side.trainer, held, held.nbytes(self.dtype_bytes), self.layout.trainer_share(held.category))
            for held in self.model.held
        ]

    def adapter(self) -> list[Part]:
        """Adapter, gradients, master weights and moments on one GPU."""
        adapter = self.config.adapter
        t, m = on_gpu(self.sites, adapter, self.layout.trainer_share)
        size = f"block {adapter.block_size}" if adapter.kind is AdapterKind.oft else f"rank {adapter.rank}"
        what = f"{count(t)} trained numbers on this GPU ({adapter.kind} {size})"
        rows = [
            ("adapter as multiplied", 2 * m, f"2 B x {count(m)} numbers in BF16"),
            ("master weights (float32)", 4 * t, f"4 B x {what}"),
            ("gradients", 4 * (t + m), f"4 B x ({count(t)} trained numbers + {count(m)} of the matrices)"),
            ("optimizer moments", 8 * t, f"2 moments x 4 B x {count(t)}"),
        ]
        return [Part(name=n, side=Side.trainer, nbytes=b, formula=f, certain=True) for n, b, f in rows if b]

    def transient(self) -> tuple[str, list[Part]]:
        """On a GPU the name of the largest moment of training; and what exists only while training, at its largest."""
        when, parts = "", [self.activations(), self.backward(), self.attention(), self.logits(), self.decoded()]
        parts += [self.copies(), self.series()]
        if self.layout.on_gpu:
            when, parts = Moments(
                config=self.config,
                model=self.model,
                layout=self.layout,
                lengths=self.lengths,
                sites=self.sites,
                dtype_bytes=self.dtype_bytes,
            ).largest()
        return when, [part for part in (*parts, self.gathered(), self.replay()) if part.nbytes]

    def activations(self) -> Part:
        """What the forward pass keeps for the backward pass."""
        a, size, tokens = self.shape.activations, self.dtype_bytes, self.lengths.micro_tokens
        dense, sparse = (
            sum(kept.bytes(size) for kept in (*a.attention, *kind)) if layers else 0
            for kind, layers in ((a.dense, a.dense_layers), (a.experts, a.expert_layers))
        )
        if self.config.trainer.activation_checkpointing:
            per_token = self.shape.layers * a.stream * size + max(dense, sparse)
            formula = (
                f"{tokens:,} tokens x ({self.shape.layers} layers x {a.stream} x {size} B kept + "
                f"{max(dense, sparse):,} B of the layer that is recomputed)"
            )
        else:
            per_token = a.dense_layers * dense + a.expert_layers * sparse
            kinds = [(a.dense_layers, dense, "dense"), (a.expert_layers, sparse, "expert")]
            listed = " + ".join(f"{n} {kind} layer{'s' * (n > 1)} x {each:,} B" for n, each, kind in kinds if n)
            formula = f"{tokens:,} tokens x ({listed})"
        return Part(name="activations", side=Side.trainer, nbytes=tokens * per_token, formula=formula)

    def backward(self) -> Part:
        """Gradients of activations: the widest layer's inner tensors and its input."""
        a, tokens, size, widest = self.shape.activations, self.lengths.micro_tokens, self.dtype_bytes, self.shape.widest
        return Part(
            name="backward working set",
            side=Side.trainer,
            nbytes=tokens * (widest + 2 * a.stream) * size,
            formula=f"{tokens:,} tokens x ({widest:,} in the widest layer + 2 x {a.stream:,} hidden) x {size} B",
        )

    def attention(self) -> Part:
        """What grows with pairs of tokens: the mask of shared prompts, and probabilities where nothing is fused."""
        a, tokens, row = self.shape.activations, self.lengths.micro_tokens, self.lengths.row
        layers = 1 if self.config.trainer.activation_checkpointing else self.shape.layers
        shared = self.lengths.micro_samples > 1 and self.config.rollout.group_size > 1
        mask = 1 + layers * self.dtype_bytes if shared else 0
        plain = layers * a.probabilities * 4
        return Part(
            name="attention mask and pairs",
            side=Side.trainer,
            nbytes=tokens * row * (mask + plain),
            formula=f"{tokens:,} tokens x rows of {row:,} x ({mask:,} B mask + {plain:,} B probabilities over {layers} "
            "layers)",
        )

    def logits(self) -> Part:
        """Chunked log-probs: logits of one chunk, and the hidden states with their slopes."""
        chunk = min(self.config.trainer.logprob_chunk_tokens, self.lengths.scored)
        each = 4 * LOGIT_COPIES + (2 if self.dtype_bytes == 2 else 0)  # and the rounded probabilities
        rows = 3 * self.lengths.scored * self.shape.hidden * self.dtype_bytes
        return Part(
            name="logits of one chunk",
            side=Side.trainer,
            nbytes=chunk * self.shape.vocabulary * each + rows,
            formula=f"{chunk:,} tokens x {self.shape.vocabulary:,} words x {each} B + hidden states and slopes "
            f"3 x {self.lengths.scored:,} x {self.shape.hidden:,} x {self.dtype_bytes} B",
        )

    def decoded(self) -> Part:
        """The largest weight that is decoded at a time: its float32 form, the codes, and the compute dtype's copy."""
        widest, name = self.model.widest
        each = 5 + (2 if self.dtype_bytes == 2 else 0)
        return Part(
            name="decoded weight",
            side=Side.trainer,
            nbytes=widest * each,
            formula=f"{count(widest)} numbers of {name} x {each} B",
        )

    def copies(self) -> Part:
        """The adapter in float32, where activations are: of every layer, or of the one that is recomputed."""
        sites = self.sites if self.dtype_bytes == 4 else []
        _, numbers = on_gpu(sites, self.config.adapter, self.layout.trainer_share)
        if self.config.trainer.activation_checkpointing:
            numbers = -(-numbers // self.shape.layers)
        return Part(
            name="adapter in float32",
            side=Side.trainer,
            nbytes=4 * numbers,
            formula=f"4 B x {count(numbers)} numbers of layers that are at work",
        )

    def series(self) -> Part:
        """The Cayley-Neumann series of a chunk of rotations, with the powers that its gradient keeps."""
        adapter = self.config.adapter
        if adapter.kind is not AdapterKind.oft:
            return Part(name="rotation series", side=Side.trainer, nbytes=0, formula="")
        total = sum(site.multiplied(adapter) for site in self.sites)
        chunk, copies = min(SERIES_CHUNK, total), adapter.neumann_terms + 4
        return Part(
            name="rotation series",
            side=Side.trainer,
            nbytes=4 * chunk * copies,
            formula=f"{count(chunk)} numbers x {copies} copies x 4 B",
        )

    def gathered(self) -> Part:
        """Fully sharded: the largest unit that is gathered, a weight or one GPU's share of a layer's experts."""
        if self.layout.trainer is not TrainerLayout.sharded or self.layout.trainer_gpus == 1:
            return Part(name="gathered weights", side=Side.trainer, nbytes=0, formula="")
        unit = largest_unit(self.shape, self.model.rules, self.layout.trainer_gpus)
        return Part(
            name="gathered weights",
            side=Side.trainer,
            nbytes=2 * unit,
            formula="2 x the largest weight of a layer (experts in chunks): one in use, one on its way",
        )

    def replay(self) -> Part:
        """The engine's expert choices, replayed: one 2-byte number per token of the step, expert layer and choice."""
        on = self.config.memory.routing_replay and self.shape.experts
        layers, top_k = self.shape.activations.expert_layers, self.shape.experts_per_token
        tokens = self.lengths.samples * self.lengths.longest if on else 0
        return Part(
            name="routing replay",
            side=Side.trainer,
            nbytes=tokens * layers * top_k * 2,
            formula=f"{tokens:,} tokens x {layers} layers x {top_k} choices x 2 B",
        )


def base_part(side: Side, held: Held, nbytes: int, share: float, extra: str = "") -> Part:
    """One category of the base on one GPU."""
    split = f" / {round(1 / share)} GPUs" if share < 1 else ""
    return Part(
        name=f"{BASE}{held.category}",
        side=side,
        nbytes=round(nbytes * share),
        formula=f"{count(held.parameters)} weights x {8 * nbytes / held.parameters:.2f} bit{split}{extra}",
        certain=True,
    )
