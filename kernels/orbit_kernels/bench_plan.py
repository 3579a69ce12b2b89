"""What `python -m orbit_kernels.bench` measures: shapes of expert layers, and cases in order of importance."""

from __future__ import annotations

from dataclasses import dataclass

SHAPES = {
    # name: (experts, hidden, intermediate, experts per token)
    "kimi-k2.6": (384, 7168, 2048, 8),
    "v4-flash": (256, 4096, 2048, 6),
    "v4-pro": (384, 7168, 3072, 6),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "kimi-k2.6-ep8": (48, 7168, 2048, 1),  # one of 8 ranks: of a token's 8 experts one is here in the mean
    "kimi-k2.6-tp8": (384, 7168, 256, 8),
}
TRAINING = ("kimi-k2.6", "v4-flash", "v4-pro")
DECODING = ("qwen3-30b-a3b", "kimi-k2.6-tp8", "kimi-k2.6-ep8", "v4-flash")
TOKENS = (1024, 4096, 16384, 65536)
MIDDLE = (4096, 16384)
DECODING_TOKENS = (1, 16, 64, 256, 4096)
PEER_TOKENS = 16384
"""SGLang cuts a prefill into chunks of 16,384 tokens at most, so its kernels are not timed beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One layer in one format at some sizes, and which paths beside BF16 and the kernels are timed."""

    shape: str
    format: str
    tokens: tuple[int, ...]
    decoding: bool = False  # CUDA-graph replays of the forward alone; else both passes
    chunks: bool = False  # chunked.py
    whole: bool = False  # the MLP with adapters, forward and backward
    slow: tuple[int, ...] = ()  # sizes at which the paths that decode first are timed too
    peers: bool = False  # SGLang's fused experts


RECORD = (
    Case(shape="kimi-k2.6", format="int4", tokens=TOKENS, chunks=True, whole=True, slow=MIDDLE, peers=True),
    Case(shape="qwen3-30b-a3b", format="int4", tokens=DECODING_TOKENS, decoding=True, peers=True),
    Case(shape="kimi-k2.6-tp8", format="int4", tokens=DECODING_TOKENS, decoding=True, peers=True),
    Case(shape="kimi-k2.6-ep8", format="int4", tokens=DECODING_TOKENS, decoding=True, peers=True),
    Case(shape="v4-flash", format="mxfp4", tokens=DECODING_TOKENS, decoding=True, peers=True),
    Case(shape="v4-flash", format="mxfp4", tokens=TOKENS, chunks=True, slow=(4096,), peers=True),
    Case(shape="kimi-k2.6", format="mxfp4", tokens=TOKENS, chunks=True),
    Case(shape="v4-flash", format="nvfp4", tokens=MIDDLE, chunks=True),
    Case(shape="v4-flash", format="fp8", tokens=MIDDLE, chunks=True),
    Case(shape="v4-pro", format="mxfp4", tokens=TOKENS, chunks=True),
)
"""What docs/benchmarks.md shows: seven minutes on an H200."""


def everything() -> tuple[Case, ...]:
    """All shapes in all formats at all sizes by all paths: half an hour or more."""
    formats = ("int4", "mxfp4", "nvfp4", "fp8")
    decoding = chosen(DECODING, ("int4",), DECODING_TOKENS, True) + chosen(
        DECODING[-1:], ("mxfp4",), DECODING_TOKENS, True
    )
    return chosen(TRAINING, formats, TOKENS) + decoding


def chosen(
    shapes: tuple[str, ...], formats: tuple[str, ...], tokens: tuple[int, ...], decoding: bool = False
) -> tuple[Case, ...]:
    """Every path of the given shapes, formats and sizes."""
    return tuple(
        Case(shape=shape, format=fmt, tokens=tokens, decoding=True, peers=True)
        if decoding
        else Case(shape=shape, format=fmt, tokens=tokens, chunks=True, whole=True, slow=MIDDLE, peers=True)
        for shape in shapes
        for fmt in formats
    )
