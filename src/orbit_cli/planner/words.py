"""What the parts of a plan are called where people read them, and what each is. JSON keeps the short names."""

from __future__ import annotations

from orbit_cli.planner.part import BASE

# name of a part -> (shown, meaning)
WORDS = {
    "base: routed experts": ("base: routed experts", "experts of which a router chooses a few for each token"),
    "base: shared expert": ("base: shared expert", "the expert that every token visits"),
    "adapter as multiplied": (
        "adapter's matrices",
        "the rotations (OFT) or factors (LoRA) that layers multiply by, made from the trained numbers",
    ),
    "master weights (float32)": ("adapter's trained numbers", "in float32, what the optimizer moves"),
    "gradients": ("adapter's gradients", "of the trained numbers and of the matrices made from them"),
    "optimizer moments": ("optimizer moments", "Adam's two running means of the gradients"),
    "rotation series": ("making the rotations", "powers of matrices from which OFT makes rotations, some at a time"),
    "adapter in float32": ("adapter in float32", "copies of its matrices while layers are at work"),
    "product workspaces": ("cuBLAS workspaces", "scratch memory of NVIDIA's matrix products"),
    "activations": ("activations", "what the forward pass keeps for the backward pass"),
    "backward working set": ("backward pass of one layer", "what only exists while one layer's gradients are made"),
    "attention mask and pairs": ("attention scores", "a number for each two tokens that attend to each other"),
    "decoded weight": ("one decoded weight", "a 4- or 8-bit weight is decoded while it is multiplied"),
    "gathered weights": ("gathered weights", "a split weight is brought together while it is used"),
    "logits of one chunk": ("logits of one chunk", "a number for each word of the vocabulary, some tokens at a time"),
    "adapter slots": ("adapter slots", "versions of the adapter that requests may still use, and one for none"),
    "KV cache": ("KV cache", "keys and values of the tokens of running sequences (engine.max_total_tokens)"),
    "state of running sequences": ("state of sequences", "compressed attention keeps this per sequence, however long"),
    "CUDA graphs": ("CUDA graphs", "recorded decoding steps and their memory (engine.cuda_graph_max_bs)"),
    "CUDA context": ("CUDA context", "what the driver needs for one process"),
    "prefill and sampling": ("reading prompts, sampling", "activations of one chunk of prompts, logits of one step"),
    "kept by the allocator after training": (
        "peak of training, not given back",
        "PyTorch keeps freed memory for its own process, so it is in both columns",
    ),
    "kept by the allocator after sampling": (
        "peak of sampling, not given back",
        "PyTorch keeps freed memory for its own process, so it is in both columns",
    ),
    "libraries": ("libraries", "a process before it holds anything of the model"),
    "allocator": ("allocator's slack", "what C's allocator takes on top of memory that comes and goes"),
    "routing replay": ("routing replay", "the engine's choices of experts, to be repeated in training"),
}


def shown(name: str) -> str:
    """What a part is called for people.

    >>> shown("rotation series"), shown("base: attention")
    ('making the rotations', 'base: attention')
    """
    return WORDS.get(name, (name, ""))[0]


def meanings(names: list[str]) -> list[tuple[str, str]]:
    """(shown, meaning) of those names that need one, in their order."""
    base = [("base", "the frozen model")] if any(name.startswith(BASE) for name in names) else []
    return [*base, *(WORDS[name] for name in dict.fromkeys(names) if name in WORDS)]
