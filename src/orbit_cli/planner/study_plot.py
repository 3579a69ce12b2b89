"""The memory study as one SVG: bytes over parameters, both logarithmic. Drawn by hand; no library, no fonts."""

from __future__ import annotations

import math
from html import escape

from orbit_cli.planner.machine import gpu_machines, whole_memory
from orbit_cli.planner.study import FROZEN, RECIPES, Row

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 46, 56
LINE = 15  # between labels
COLOURS = ("#9aa0a6", "#5f8dd3", "#2a9d8f", "#d1495b")
NODE = 8  # GPUs of the machines that are drawn as lines


def plot(rows: list[Row]) -> str:
    """An SVG document."""
    names = [*RECIPES, FROZEN]
    xs = [row.parameters for row in rows]
    ys = [value for row in rows for value in (*row.nbytes.values(), row.checkpoint_bytes)]
    x0, x1 = min(xs) * 0.7, max(xs) * 1.4
    y0, y1 = min(ys) * 0.6, max(ys) * 1.5

    def px(x: float) -> float:
        return LEFT + math.log(x / x0) / math.log(x1 / x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - math.log(y / y0) / math.log(y1 / y0) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">Weights and gradients over model size</text>',
    ]
    for power in range(math.ceil(math.log10(y0)), math.floor(math.log10(y1)) + 1):
        y, label = py(10.0**power), f"{10 ** (power - 9):g} GB"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    nodes = [(name, whole_memory(hardware)) for name, hardware in gpu_machines() if hardware.gpus == NODE]
    for index, (name, nbytes) in enumerate(nodes):
        y = py(nbytes)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" stroke-dasharray="4 4"/>'
            f'<text x="{LEFT + 6 + 60 * index}" y="{y - 4:.1f}" fill="#666">{name}</text>'
        )
    above = 0.0  # where the label before ended
    for index, recipe in enumerate(names):
        points = [(px(row.parameters), py(row.nbytes[recipe])) for row in rows]
        parts.append(_line(points, COLOURS[index]))
        x, y = points[-1]
        above = max(y + 4, above + LINE)
        label = f"{recipe}: {rows[-1].nbytes[recipe] / 1e9:,.0f} GB"
        parts.append(f'<text x="{x + 8:.1f}" y="{above:.1f}" fill="{COLOURS[index]}">{escape(label)}</text>')
    for index, row in enumerate(rows):
        x, y = px(row.parameters), py(row.checkpoint_bytes)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="none" stroke="#d1495b"/>')
        low = HEIGHT - BOTTOM + (18 if index % 2 == 0 else 34)
        parts.append(f'<text x="{x:.1f}" y="{low}" text-anchor="middle">{escape(row.name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="#666">circles: the 4-bit files as they really are</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(points: list[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
