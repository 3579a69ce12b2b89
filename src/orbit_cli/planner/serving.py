"""The engine's share of a plan: base, adapter slots, key-value cache, graphs, prefill. No torch.

Counts what SGLang 0.5.17 does under orbit_cli.engine: it reserves mem_fraction_static of a GPU for base, slots and
cache unless engine.max_total_tokens bounds the cache; our plugin holds engine.live_versions + 1 slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_cli.config.schema import OrbitConfig
from orbit_cli.config.schema.base import ExpertWidth
from orbit_cli.config.schema.memory import EngineLayout
from orbit_cli.engine.arguments import CPU_TOKENS
from orbit_cli.errors import ConfigError
from orbit_cli.planner.adapters import Site, own_expert_inputs
from orbit_cli.planner.layout import Layout
from orbit_cli.planner.lengths import Lengths
from orbit_cli.planner.model import Model
from orbit_cli.planner.part import GIB, Part, Side, count, size
from orbit_cli.planner.shape import Category, ModelShape
from orbit_cli.planner.training import base_part

# SGLang's chunked_prefill_size by the GPU's GiB; engine.extra.chunked_prefill_size overrides it
PREFILL_TOKENS = ((35, 2048), (60, 4096), (160, 8192))
LARGEST_PREFILL, CPU_PREFILL = 16384, 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What the engine's parts depend on."""

    config: OrbitConfig
    model: Model
    layout: Layout
    lengths: Lengths
    sites: list[Site]  # what has slots
    dtype_bytes: int
    memory: int | None  # bytes of one GPU

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def resident(self, with_base: bool = True) -> list[Part]:
        """What the engine holds from its start to its end; `with_base` is off where it reads the trainer's copy."""
        base, slots = self.base(), self.slots()
        held = sum(part.nbytes for part in (*base, *slots))
        parts = [*(base if with_base else []), *slots, *self.cache(held), *self.graphs()]
        return [part for part in parts if part.nbytes]

    def base(self) -> list[Part]:
        """The frozen base by category. On a CPU quantised linears are kept decoded too; experts stay packed."""
        parts = []
        for held in self.model.held:
            nbytes, extra = held.nbytes(self.dtype_bytes), ""
            decoded = held.quantised * self.dtype_bytes
            if not self.layout.on_gpu and decoded and held.category is not Category.experts:
                nbytes, extra = nbytes + decoded, f", of them {size(decoded)} decoded for the CPU"
            parts.append(base_part(Side.engine, held, nbytes, self.layout.engine_share(held.category), extra))
        return parts

    def slots(self) -> list[Part]:
        """Adapter slots: live versions and the base's own, in the activations' dtype."""
        adapter, total = self.config.adapter, 0.0
        count_slots = self.config.engine.live_versions + 1
        ranks = self.layout.engine_gpus
        for site in self.sites:
            if self.layout.engine is EngineLayout.tensor_parallel:
                total += site.multiplied_on_rank(adapter, ranks)
            elif self.layout.engine is EngineLayout.expert_parallel and site.experts:
                total += site.multiplied(adapter) / ranks
            else:
                total += site.multiplied(adapter)
        numbers = round(total)
        return [
            Part(
                name="adapter slots",
                side=Side.engine,
                nbytes=numbers * count_slots * self.dtype_bytes,
                formula=f"{count_slots} slots (engine.live_versions + base) x {count(numbers)} numbers x "
                f"{self.dtype_bytes} B",
                certain=True,
            )
        ]

    def cache(self, held: int) -> list[Part]:
        """The key-value cache of one GPU."""
        each, why = self.token_bytes()
        tokens = self.config.engine.max_total_tokens
        if not self.layout.on_gpu:
            pool = tokens or CPU_TOKENS
            formula = f"{pool:,} tokens x {each:,.0f} B ({why})"
            return [Part(name="KV cache", side=Side.engine, nbytes=round(pool * each), formula=formula)]
        state = self._state_bytes()
        if tokens is None:
            return [*self._state(state), self._open_cache(held + state, each, why)]
        part = Part(
            name="KV cache",
            side=Side.engine,
            nbytes=round(tokens * each),
            formula=f"engine.max_total_tokens={tokens:,} x {each:,.0f} B ({why})",
        )
        return [*self._state(state), part]

    def cache_room(self) -> tuple[int | None, str]:
        """Tokens of the cache as a run has it, and what gives them the room; None where that is not known, or where the
        rest of the plan says already that there is too little."""
        if self.set_room()[0] is not None or not self.memory:
            return self.set_room()
        fraction = self.config.engine.mem_fraction_static
        held = sum(part.nbytes for part in (*self.base(), *self.slots())) + self._state_bytes()
        tokens = int((self.memory * fraction - held) / self.token_bytes()[0])
        what = f"the cache (what base and slots leave of engine.mem_fraction_static={fraction:g}) has room"
        return (None if tokens < self.lengths.longest else tokens), what

    def set_room(self) -> tuple[int | None, str]:
        """As `cache_room` where the number of tokens is set; None where it is what the GPU has left."""
        tokens = self.config.engine.max_total_tokens
        if tokens is None and not self.layout.on_gpu:
            return CPU_TOKENS, "engine.max_total_tokens is not set, and then a CPU's cache has room"
        return tokens, "engine.max_total_tokens has room"

    def _state_bytes(self) -> int:
        return self.shape.cache.sequence_bytes * (self.config.engine.max_running_requests + 2)

    def _state(self, nbytes: int) -> list[Part]:
        each, running = self.shape.cache.sequence_bytes, self.config.engine.max_running_requests
        formula = f"(engine.max_running_requests={running} + 2) x {each:,} B of compression state"
        return [Part(name="state of running sequences", side=Side.engine, nbytes=nbytes, formula=formula)]

    def _open_cache(self, held: int, each: float, why: str) -> Part:
        """Without engine.max_total_tokens SGLang takes its whole share of the GPU."""
        fraction, need = self.config.engine.mem_fraction_static, self.lengths.in_flight * each
        share = (self.memory or 0) * fraction
        nbytes = max(share - held, need) if self.memory else need
        taken = f"{fraction:g} of the GPU less base and slots"
        if not self.memory:
            taken = f"SGLang takes {taken}, of which only the sequences in flight are counted here"
        return Part(
            name="KV cache",
            side=Side.engine,
            nbytes=round(nbytes),
            formula=f"engine.max_total_tokens is not set: {taken}, {count(nbytes / each)} tokens x {each:,.0f} B "
            f"({why})",
        )

    def token_bytes(self) -> tuple[float, str]:
        """Bytes that one token takes in one GPU's cache, and how they come about."""
        cache = self.shape.cache
        if cache.packed_bytes:
            packed = cache.packed_bytes + cache.window_bytes
            return packed, f"{cache.formula} = {cache.packed_bytes:,.0f} B, {cache.window_bytes:,.0f} B window"
        ranks = self.layout.engine_gpus if self.layout.engine is EngineLayout.tensor_parallel else 1
        split = min(ranks, cache.heads)
        shared = f" / {split} GPUs" if split > 1 else ", on every GPU" if ranks > 1 else ""
        return cache.elements * self.dtype_bytes / split, f"{cache.formula} x {self.dtype_bytes} B{shared}"

    def graphs(self) -> list[Part]:
        """CUDA graphs and workspaces."""
        if not self.layout.on_gpu or not self.config.engine.cuda_graph_max_bs:
            return []
        gib = self.config.memory.graphs_gib
        formula = f"memory.graphs_gib={gib:g}, for batches up to {self.config.engine.cuda_graph_max_bs}"
        return [Part(name="CUDA graphs", side=Side.engine, nbytes=round(gib * GIB), formula=formula)]

    def transient(self) -> list[Part]:
        """What exists only while sampling: activations of one prefill chunk, and logits of the running batch."""
        chunk = min(self._chunk(), self.lengths.in_flight)
        inner, stream, each = self._inner(), self.shape.activations.stream, self.dtype_bytes
        logits = self.lengths.running * self.shape.vocabulary * 4 * 3
        return [
            Part(
                name="prefill and sampling",
                side=Side.engine,
                nbytes=chunk * (6 * stream + inner) * each + logits,
                formula=f"{chunk:,} tokens x (6 x {stream:,} hidden + {inner:,} in the widest layer) x {each} B + "
                f"logits of {self.lengths.running:,} sequences x {self.shape.vocabulary:,} words x 12 B",
            )
        ]

    def _chunk(self) -> int:
        """Tokens of one prefill pass; a value of 0 or below lets a whole batch through."""
        given = self.config.engine.extra.get("chunked_prefill_size")
        if given is not None:
            if not isinstance(given, int) or isinstance(given, bool):
                raise ConfigError(
                    f"engine.extra.chunked_prefill_size={given} is no whole number; set for example 8192, or -1 for "
                    "prompts in one piece"
                )
            return given if given > 0 else self.lengths.in_flight
        if not self.layout.on_gpu:
            return CPU_PREFILL
        below = [tokens for gib, tokens in PREFILL_TOKENS if self.memory and self.memory < gib * GIB]
        return below[0] if below else LARGEST_PREFILL

    def _inner(self) -> int:
        """Numbers of one token inside the widest layer. On a GPU each token is a row of every expert that it visits:
        tensor parallelism splits an expert's width and not its input, of which rotations make one for gate and up each.
        """
        a, k, ranks = self.shape.activations, self.shape.experts_per_token, 1
        if self.layout.engine is EngineLayout.tensor_parallel:
            ranks = self.layout.engine_gpus
        if not (self.layout.on_gpu and a.expert_layers):
            return self.shape.widest // ranks
        adapter, width, hidden = self.config.adapter, a.expert_width // ranks, self.shape.hidden
        rows = max((2 if own_expert_inputs(adapter) else 1) * hidden + 2 * width, hidden + 4 * width)
        turned = hidden if adapter.expert_width is ExpertWidth.shared else 0  # a copy: the router reads the other
        return max(4 * a.dense_width // ranks, k * rows + turned)
