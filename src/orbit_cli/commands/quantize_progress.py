"""Progress of `orbit quantize`: one line that is rewritten on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from orbit_cli.telemetry.console import duration

if TYPE_CHECKING:
    from orbit_cli.quantization.convert import Progress, QuantizationReport

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_REWRITES = 0.2


class QuantizeProgress:
    """Shows each Progress that it is given, but not more often than a person can read."""

    def __init__(self) -> None:
        self._rewrites = sys.stdout.isatty()
        self._pause = SECONDS_BETWEEN_REWRITES if self._rewrites else SECONDS_BETWEEN_LINES
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rewrites:
            print(flush=True)

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown_at < self._pause and progress.bytes_done < progress.bytes_total:
            return
        self._shown_at = now
        line = progress_line(progress)
        print(f"\r\x1b[2K{line}" if self._rewrites else line, end="" if self._rewrites else "\n", flush=True)


def progress_line(progress: Progress) -> str:
    """`shard 2/4  1.3 of 5.0 GiB (26%)  120 MiB/s  ETA 31s  model.layers.7.mlp.up_proj`."""
    share = progress.bytes_done / max(1, progress.bytes_total)
    rate = progress.bytes_done / max(1e-9, progress.elapsed_s) / 2**20
    eta = "" if progress.eta_s is None else f"  ETA {duration(progress.eta_s)}"
    size = f"{progress.bytes_done / 2**30:.2f} of {progress.bytes_total / 2**30:.2f} GiB ({share:.0%})"
    return f"shard {progress.shard}/{progress.shards}  {size}  {rate:.0f} MiB/s{eta}  {progress.tensor}"


def report_text(report: QuantizationReport) -> str:
    """What a conversion did, in a few lines; the errors of single modules are in report.json."""
    worst = sorted(report.modules.items(), key=lambda item: -item[1]["relative_rms"])[:3]
    if not report.quantized and not report.kept and report.copied == 0:
        return f"{report.format}: every tensor is copied as it is, nothing is encoded\nwrote    {report.output}"
    lines = [
        f"{report.format}: {report.quantized} linears encoded, {report.copied} copied byte for byte, "
        f"{len(report.kept)} kept in bfloat16",
        f"size     {report.bytes_before / 2**20:.1f} -> {report.bytes_after / 2**20:.1f} MiB",
        f"error    relative RMS {report.relative_rms:.4f}, largest {report.max_abs:.4g}",
        *(f"worst    {name}: relative RMS {error['relative_rms']:.4f}" for name, error in worst),
        *(f"kept     {name}: {why}" for name, why in list(report.kept.items())[:5]),
        f"wrote    {report.output}",
    ]
    return "\n".join(lines)
