"""The memory study as a picture: bytes over parameters, both logarithmic, with the machines of eight GPUs as lines."""

from __future__ import annotations

import io

from orbit_cli.planner.machine import gpu_machines, whole_memory
from orbit_cli.planner.study import FROZEN, RECIPES, Row

FORMATS = ("svg", "png", "pdf")
NODE = 8  # GPUs of the machines that are drawn as lines
COLOURS = ("#9aa0a6", "#5f8dd3", "#2a9d8f", "#d1495b")  # of the recipes, the frozen base last


def plot(rows: list[Row], kind: str) -> bytes:
    """The content of a file of one of FORMATS."""
    import matplotlib  # a second of import, for this picture alone

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "orbit"}):  # text stays text; the same bytes
        figure = _draw(rows)
        content = io.BytesIO()
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def _draw(rows: list[Row]):
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="parameters", ylabel="GB")
    axes.set_title("Weights and gradients over model size")
    parameters = [row.parameters for row in rows]
    for name, colour in zip([*RECIPES, FROZEN], COLOURS, strict=True):
        gigabytes = [row.recipe_bytes[name] / 1e9 for row in rows]
        axes.plot(
            parameters, gigabytes, "o-", color=colour, label=f"{name}: {gigabytes[-1]:,.0f} GB for {rows[-1].name}"
        )
    files = [row.base_bytes / 1e9 for row in rows]
    axes.plot(
        parameters, files, "o", markersize=9, fillstyle="none", color=COLOURS[-1], label="4-bit files as they are"
    )
    nodes = [(name, whole_memory(hardware) / 1e9) for name, hardware in gpu_machines() if hardware.gpus == NODE]
    for index, (name, gigabytes) in enumerate(nodes):
        axes.axhline(gigabytes, color="#888", linestyle="--", linewidth=0.8)
        beside = (0.01 + 0.08 * index, gigabytes)  # neighbours are too near to stand above each other
        axes.annotate(name, beside, xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xticks(parameters, [row.name for row in rows], rotation=15)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.4)
    axes.legend(loc="lower right", fontsize="small")
    return figure
