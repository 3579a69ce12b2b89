"""What exists on a GPU only while the trainer works, at its largest moment. No torch.

A step passes through moments that exclude each other: the end of a forward pass (logits), the backward pass of one
layer, the optimiser's update, and the rotations' series. Only the largest is in the plan, since no other is reached
beside it. What a token keeps is in the families' ActivationShape; what each path decodes follows orbit_kernels:

    dense linears        multiplied by the stored bytes (linear.py), where both sizes are multiples of 32
    routed experts       trainer.expert_path: auto and kernels by the stored bytes (expert_layer.py), chunked through
                         decoded chunks (chunked.py), reference one decoded expert at a time (experts.py)

Checked by tests/planner/test_gpu_training.py, which counts the tensors of real training steps on an imagined GPU.

Shape letters: H hidden, I width of an MLP, R rows (tokens x experts per token).
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import AdapterKind, ExpertWidth
from orbit_cli.config.schema.learning import ExpertPath
from orbit_cli.planner.adapters import ROLES, Site, on_gpu, own_expert_inputs
from orbit_cli.planner.layout import Layout
from orbit_cli.planner.lengths import Lengths
from orbit_cli.planner.model import Model
from orbit_cli.planner.part import Part, Side, count
from orbit_cli.planner.shape import Category, Kept, ModelShape, Weight

FORWARD, BACKWARD = "the end of a forward pass", "the backward pass of one layer"
UPDATE, ROTATIONS = "the optimizer's update", "the gradients' way back through the rotations"
SERIES_CHUNK = 1 << 24  # numbers of rotations built at a time: adapters/parts.py
TRIAL_BYTES = 1 << 30  # expert_path=fastest tries chunked.py's own budget once
LOGIT_BYTES = 12  # of a logit: log-prob, its exponential and the product of both, float32
DECODING_BYTES = 7  # of a weight while it is decoded: codes, float32 form and the compute dtype's copy
SMALLEST_RANK = 16  # lora.py pads to it
STEP = 32  # sizes that the kernels take are multiples of this


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """The moments of a training step; every one is a list of parts."""

    config: OrbitConfig
    model: Model
    layout: Layout
    lengths: Lengths
    sites: list[Site]  # what the adapter sits on
    dtype_bytes: int

    def building(self) -> int:
        """Bytes while rotations are built without gradients, as before every publish: four copies of a chunk."""
        adapter = self.config.adapter
        built = sum(site.multiplied(adapter) for site in self.sites) if adapter.kind is AdapterKind.oft else 0
        return 4 * 4 * min(SERIES_CHUNK, built)

    def largest(self) -> tuple[str, list[Part]]:
        """The name of the moment that holds most, and its parts."""
        return max(self.all().items(), key=lambda moment: sum(part.nbytes for part in moment[1]))

    def all(self) -> dict[str, list[Part]]:
        """Each moment's parts, the empty ones left out."""
        outside = [self._activations(in_layer=False), self._mask(in_layer=False), self._copies(in_layer=False)]
        inside = [self._activations(in_layer=True), self._mask(in_layer=True), self._copies(in_layer=True)]
        moments = {
            FORWARD: [*outside, self._logits()],
            BACKWARD: [*inside, self._backward(), self._decoded()],
            UPDATE: [self._update()],
            ROTATIONS: [self._series()],
        }
        return {when: [part for part in parts if part.nbytes] for when, parts in moments.items()}

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    @property
    def recomputes(self) -> bool:
        return self.config.trainer.activation_checkpointing

    @property
    def path(self) -> ExpertPath:
        """How routed experts are multiplied; the kernels take BF16 activations only."""
        wanted = self.config.trainer.expert_path
        taken = all(self._in_kernels(weight) for weight in self.shape.of(Category.experts))
        return ExpertPath.reference if wanted is ExpertPath.auto and not taken else wanted

    def _activations(self, in_layer: bool) -> Part:
        """What the forward pass keeps; with recomputation each layer's input, and in a backward pass one layer more."""
        a, size, tokens = self.shape.activations, self.dtype_bytes, self.lengths.micro_tokens
        experts = a.experts if self.path is ExpertPath.reference else a.packed_experts
        dense = self._of_layer(a.attention, a.dense) if a.dense_layers else 0
        sparse = self._of_layer(a.attention, experts) if a.expert_layers else 0
        sparse += self._expert_low_ranks() + self._turned() if a.expert_layers else 0
        hidden = self.shape.hidden
        if self.recomputes:
            each = self.shape.layers * a.stream * size
            formula = f"{self.shape.layers} layers x {a.stream:,} x {size} B kept + "
            more = max(dense, sparse) if in_layer else (4 + size) * hidden  # the last norm: float32 input, and output
            each += more
            formula += f"{more:,} B of the layer that is recomputed" if in_layer else f"{more:,} B of the last norm"
        else:
            each = a.dense_layers * dense + a.expert_layers * sparse + size * hidden
            kinds = [(a.dense_layers, dense, "dense"), (a.expert_layers, sparse, "expert")]
            formula = " + ".join(f"{n} {kind} layer{'s' * (n > 1)} x {nbytes:,} B" for n, nbytes, kind in kinds if n)
            formula += f" + {size} x {hidden:,} B of the last hidden state"
        return _part("activations", tokens * each, f"{tokens:,} tokens x ({formula})")

    def _of_layer(self, *kinds: tuple[Kept, ...]) -> int:
        """Bytes of one token in one layer; an input is kept where an adapter's gradient needs it."""
        adapted = set(self.config.adapter.targets)
        kept = [one for kind in kinds for one in kind if not one.only_for or adapted.intersection(one.only_for)]
        return sum(one.bytes(self.dtype_bytes) for one in kept) + self._low_ranks()

    def _low_ranks(self) -> int:
        """LoRA on dense linears keeps x A^T of each."""
        adapter = self.config.adapter
        if adapter.kind is not AdapterKind.lora:
            return 0
        linears = sum(site.linears for site in self.sites if not site.experts)
        return -(-linears // self.shape.layers) * adapter.rank * self.dtype_bytes

    def _expert_low_ranks(self) -> int:
        """LoRA on experts keeps x A^T of every row, in ranks padded to a power of two (`lora.padded_rank`)."""
        adapter = self.config.adapter
        if adapter.kind is not AdapterKind.lora or not adapter.expert_targets:
            return 0
        outer = 2 if {"gate_proj", "up_proj"}.intersection(adapter.expert_targets) else 0  # the other is zeros
        rank = max(SMALLEST_RANK, 1 << (adapter.rank - 1).bit_length())
        kept = outer + ("down_proj" in adapter.expert_targets)
        return kept * rank * self.shape.experts_per_token * self.dtype_bytes

    def _turned(self) -> int:
        """A shared rotation's output is kept for the kernels, and its input for the rotation's gradient."""
        shared = self.config.adapter.expert_width is ExpertWidth.shared and self.path is not ExpertPath.reference
        return self.shape.hidden * self.dtype_bytes if shared else 0

    def _mask(self, in_layer: bool) -> Part:
        """Pairs of tokens: the mask of shared prompts, a copy in the compute dtype per layer that is at work, and
        probabilities where attention is not fused."""
        a, tokens, row = self.shape.activations, self.lengths.micro_tokens, self.lengths.row
        layers = self.shape.layers if not self.recomputes else 1 if in_layer else 0
        shared = self.lengths.micro_samples > 1 and self.config.rollout.group_size > 1
        mask = 1 + layers * self.dtype_bytes if shared else 0
        plain = 0 if a.fused_on_gpu else layers * a.probabilities * 4
        formula = f"{mask:,} B mask + {plain:,} B probabilities over {layers} layers"
        return _part(
            "attention mask and pairs",
            tokens * row * (mask + plain),
            f"{tokens:,} tokens x rows of {row:,} x ({formula})",
        )

    def _copies(self, in_layer: bool) -> Part:
        """The adapter in float32, where activations are, kept for the backward pass of each layer that is at work."""
        sites = self.sites if self.dtype_bytes == 4 else []
        _, numbers = on_gpu(sites, self.config.adapter, self.layout.trainer_share)
        if self.recomputes:
            numbers = -(-numbers // self.shape.layers) if in_layer else 0
        return _part("adapter in float32", 4 * numbers, f"4 B x {count(numbers)} numbers of layers that are at work")

    def _logits(self) -> Part:
        """Chunked log-probs at the end of the forward pass, hidden states of scored tokens and their slopes."""
        chunk = min(self.config.trainer.logprob_chunk_tokens, self.lengths.scored)
        rows = 3 * self.lengths.scored * self.shape.hidden * self.dtype_bytes
        return _part(
            "logits of one chunk",
            chunk * self.shape.vocabulary * LOGIT_BYTES + rows,
            f"{chunk:,} tokens x {self.shape.vocabulary:,} words x {LOGIT_BYTES} B + hidden states and slopes "
            f"3 x {self.lengths.scored:,} x {self.shape.hidden:,} x {self.dtype_bytes} B",
        )

    def _backward(self) -> Part:
        """Gradients inside the widest layer: a norm's float32 chain takes 9 H numbers of 2 bytes, a SwiGLU 3 I, routed
        experts what one call of their gradient holds at a time."""
        a, tokens, hidden = self.shape.activations, self.lengths.micro_tokens, self.shape.hidden
        widest, what = max(
            (9 * a.stream, f"9 x {a.stream:,} hidden"), (3 * a.dense_width, f"3 x {a.dense_width:,} inside the MLP")
        )
        expert = self._expert_rows()
        if expert:
            k = self.shape.experts_per_token
            widest, what = max(
                (widest, what), (k * expert + 2 * hidden, f"{k} experts x {expert:,} + 2 x {hidden:,} hidden")
            )
        nbytes, formula = tokens * widest * self.dtype_bytes, f"{tokens:,} tokens x ({what}) x {self.dtype_bytes} B"
        gradients = self._expert_gradients()
        if gradients:
            nbytes += 4 * gradients
            formula += f" + 4 B x {count(gradients)} gradients of one layer's expert adapters"
        return _part("backward working set", nbytes, formula)

    def _expert_rows(self) -> int:
        """Numbers of one row in the largest moment of the experts' gradient (`expert_passes.Passes.gradients`)."""
        if not self.shape.experts:
            return 0
        hidden, width, adapter = self.shape.hidden, self.shape.activations.expert_width, self.config.adapter
        if self.path is ExpertPath.reference:
            return max(hidden, 4 * width)
        turned = adapter.kind is AdapterKind.oft
        apart = own_expert_inputs(adapter)
        activation = (4 if not turned and "down_proj" in adapter.expert_targets else 3) * width  # dh, da and LoRA's a
        through_outer = 2 * width + (3 * hidden if apart else hidden)
        if apart and self._chunks():
            through_outer += hidden  # chunked parts are joined by a copy
        return max(hidden + width, activation, through_outer)

    def _expert_gradients(self) -> int:
        """Numbers of one layer's expert adapters, whose gradients leave the call before they are added up."""
        numbers = sum(site.multiplied(self.config.adapter) for site in self.sites if site.experts)
        share = self.layout.trainer_share(Category.experts)
        return round(numbers * share / max(self.shape.activations.expert_layers, 1))

    def _decoded(self) -> Part:
        """Decoded weights: none by the kernels; else the largest that is decoded at a time, and chunks of experts."""
        dense = [w for w in self.model.quantised if w.category is not Category.experts and not self._in_kernels(w)]
        widest = max((w.rows * w.columns for w in dense), default=0)
        named = f"{count(widest)} numbers x {DECODING_BYTES} B"
        experts = [w for w in self.model.quantised if w.category is Category.experts]
        if self.path is ExpertPath.reference and experts:
            pair = [w.rows * w.columns * (2 if ROLES[w.name] == "gate_proj" else 1) for w in experts]
            widest = max(widest, *pair)
            named = f"{count(widest)} numbers of one expert x {DECODING_BYTES} B"
        nbytes = widest * DECODING_BYTES
        budget = self._chunks()
        if budget > nbytes:
            nbytes, named = budget, f"{budget:,} B: two chunks of experts, one decoded while one is multiplied"
        return _part("decoded weight", nbytes, named)

    def _chunks(self) -> int:
        """Bytes of decoded experts that may exist at a time; 0 where no chunk is decoded."""
        if not self.shape.experts or self.path not in (ExpertPath.chunked, ExpertPath.fastest):
            return 0
        wanted = self.config.trainer.expert_chunk_bytes
        budget = max(wanted, TRIAL_BYTES) if self.path is ExpertPath.fastest else wanted
        layers, share = self.shape.activations.expert_layers, self.layout.trainer_share(Category.experts)
        pair = [w.parameters * share / layers for w in self.shape.of(Category.experts) if ROLES[w.name] != "down_proj"]
        layer = round(self.dtype_bytes * sum(pair))
        return layer if 2 * layer <= budget else budget  # one buffer, or two of half the budget

    def _in_kernels(self, weight: Weight) -> bool:
        """Whether the grouped kernels multiply by this weight (`grouped.unsupported`)."""
        return self.dtype_bytes == 2 and weight.rows % STEP == 0 and weight.columns % STEP == 0

    def _update(self) -> Part:
        """AdamW over all parameters at a time (torch's foreach form) holds the square roots of the second moments."""
        numbers, _ = on_gpu(self.sites, self.config.adapter, self.layout.trainer_share)
        return _part("optimizer step", 4 * numbers, f"4 B x {count(numbers)} roots of the second moments")

    def _series(self) -> Part:
        """The Cayley-Neumann series of a chunk of rotations, with the powers that its gradient keeps."""
        adapter = self.config.adapter
        if adapter.kind is not AdapterKind.oft:
            return _part("rotation series", 0, "")
        total = sum(site.multiplied(adapter) for site in self.sites)
        highest = adapter.neumann_terms - 1 if adapter.neumann_terms <= 2 else max(adapter.neumann_terms - 1, 3)
        chunk, copies = min(SERIES_CHUNK, total), highest + 3
        return _part("rotation series", 4 * chunk * copies, f"{count(chunk)} numbers x {copies} copies x 4 B")


def _part(name: str, nbytes: int, formula: str) -> Part:
    return Part(name=name, side=Side.trainer, nbytes=nbytes, formula=formula)
