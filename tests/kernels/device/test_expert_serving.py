"""Experts as the engine calls them: versions mixed in a batch, each token with the bits of its own version alone."""

import torch
from kernel_device import DEVICE, INTERPRETED
from test_expert_layer import TOKENS, build_adapter, random_input, random_layer

from orbit_kernels.expert_layer import expert_layer, serve_expert_layer
from orbit_kernels.experts import ExpertAdapters, StackedAdapter

PROJECTIONS = ("gate", "up", "down")


def stacked(versions: list[ExpertAdapters]) -> ExpertAdapters:
    """[E * S, ...] with group expert * S + slot."""

    def one(name: str) -> StackedAdapter:
        stacks = [getattr(version, name) for version in versions]
        fields = {
            field: torch.stack([getattr(stack, field).detach() for stack in stacks], 1).flatten(0, 1)
            for field in ("rotation", "lora_a", "lora_b")
            if getattr(stacks[0], field) is not None
        }
        return StackedAdapter(**fields, scaling=stacks[0].scaling)

    return ExpertAdapters(**{name: one(name) for name in PROJECTIONS})


def test_each_token_is_served_by_its_own_version():
    w13, w2 = random_layer("int4")
    versions = [build_adapter("both") for _ in range(3)]
    x, ids, weights, _ = random_input()
    slot = torch.randint(0, 3, (TOKENS + 5,), dtype=torch.int32, device=DEVICE)
    mixed = serve_expert_layer(x, ids, weights, w13, w2, stacked(versions), slot, 3)
    for number, version in enumerate(versions):
        own = slot[:TOKENS] == number
        assert torch.equal(mixed[own], expert_layer(x, ids, weights, w13, w2, version)[own])
    assert not torch.equal(mixed, expert_layer(x, ids, weights, w13, w2, versions[0]))


def test_padding_leaves_the_other_tokens_alone():
    w13, w2 = random_layer("int4")
    x, ids, weights, _ = random_input()
    whole = serve_expert_layer(x, ids, weights, w13, w2)
    ids[-1] = -1
    assert torch.equal(serve_expert_layer(x, ids, weights, w13, w2)[:-1], whole[:-1])


if not INTERPRETED:  # a CUDA graph needs a GPU

    def test_a_graph_replays_with_the_tokens_and_the_routing_of_the_moment():
        w13, w2 = random_layer("int4")
        x, ids, weights, _ = random_input()
        serve_expert_layer(x, ids, weights, w13, w2)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = serve_expert_layer(x, ids, weights, w13, w2)
        for _ in range(2):
            for held, fresh in zip((x, ids, weights), random_input(), strict=False):
                held.copy_(fresh)
            graph.replay()
            assert torch.equal(y, serve_expert_layer(x, ids, weights, w13, w2))
