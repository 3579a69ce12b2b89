"""What the trainer, the rollout driver and the evaluators ask of an engine: the one interface between them and SGLang.

Every method may be called from any thread. Left out: how an engine is started (each has its own constructor).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from orbit_cli.types import AdapterVersion, Completion, SampleRequest, SwapReceipt


class RolloutEngine(Protocol):
    """Samples from a frozen base under adapter versions that are loaded while requests run.

    All methods raise EngineError when the engine has failed, with the cause, and for a version that is not live.
    """

    def start(self) -> None:
        """Load the base and get ready; returns when requests can be served."""

    def shutdown(self) -> None:
        """End every process of the engine; safe at any time, also after a crash and more than once."""

    def publish(self, version: AdapterVersion) -> SwapReceipt:
        """Load a version beside the live ones; when it returns, the engine is proven to hold these bytes."""

    def generate(self, requests: list[SampleRequest]) -> list[Completion]:
        """Sample all requests, which enter the engine together; completions in the order of the requests."""

    def submit(self, request: SampleRequest) -> Future[Completion]:
        """Start one request and return at once; it finishes on the version it names, whatever comes after."""

    def score(self, token_ids: list[list[int]], version: int | None) -> list[list[float]]:
        """Log-probs at temperature 1 of the tokens 1.. of each sequence, float32, full vocabulary."""

    def retire(self) -> list[int]:
        """Drop every version but the newest that no request uses; returns their numbers."""

    def flush_cache(self) -> None:
        """Forget all cached prefixes; waits until no request runs."""

    def versions(self) -> list[int]:
        """Numbers of the live versions, oldest first."""

    def base_checksum(self) -> str:
        """sha256 over the base weights that the engine holds now, recomputed; other engines hash otherwise."""

    def gpu_memory(self) -> dict[str, int]:
        """Bytes on its first GPU, peaks since its start: `allocated` by tensors, `reserved`; empty on a CPU."""

    def info(self) -> dict[str, Any]:
        """What the engine is: versions of software, adapters held with checksums, requests running."""
