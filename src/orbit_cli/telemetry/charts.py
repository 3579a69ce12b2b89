"""Small SVG line charts and stacked bars, drawn by hand so that the report needs no script and no network.

Knows numbers and pixels; which metrics are shown is decided in report_page.py. Colours are CSS variables of the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 28


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line, with a band around it where low and high are given."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Ranges of a chart and the way to pixels."""

    x0: float
    x1: float
    y0: float
    y1: float

    def px(self, x: float) -> float:
        return LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high] with about `wanted` steps."""
    span = high - low
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(title: str, series: list[Series], *, unit: str = "", floor: float | None = None) -> str:
    """An SVG figure of one or more lines over the training step; "" if there is nothing to show.

    `floor` is a value that the vertical axis must include, usually 0.
    """
    shown = [one for one in series if one.x]
    if not shown:
        return ""
    axes = _axes(shown, floor)
    y_ticks = ticks(axes.y0, axes.y1)
    axes = Axes(x0=axes.x0, x1=axes.x1, y0=y_ticks[0], y1=y_ticks[-1])
    body = [_grid(axes, y_ticks)]
    body += [_band(one, axes, index) for index, one in enumerate(shown) if one.low]
    body += [_line(one, axes, index) for index, one in enumerate(shown)]
    return _figure(title, unit, "".join(body), [one.name for one in shown] if len(shown) > 1 else [])


def stacked_bars(title: str, x: list[float], parts: dict[str, list[float]], *, unit: str = "") -> str:
    """One bar per step, stacked from `parts`; "" if there is nothing to show."""
    if not x or not any(any(part) for part in parts.values()):
        return ""
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    y_ticks = ticks(0.0, max(totals))
    gap = min((b - a for a, b in zip(x, x[1:], strict=False)), default=1.0)
    axes = Axes(x0=x[0] - gap / 2, x1=x[-1] + gap / 2, y0=0.0, y1=y_ticks[-1])
    width = max(1.0, (axes.px(x[0] + gap) - axes.px(x[0])) * 0.8)
    bars, base = [], [0.0] * len(x)
    for index, (name, part) in enumerate(parts.items()):
        for column, value in enumerate(part):
            y, height = axes.py(base[column] + value), axes.py(base[column]) - axes.py(base[column] + value)
            bars.append(
                f'<rect class="f{index}" x="{axes.px(x[column]) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"><title>step {x[column]:g}: {escape(name)} {number(value)} {escape(unit)}'
                "</title></rect>"
            )
            base[column] += value
    return _figure(title, unit, _grid(axes, y_ticks) + "".join(bars), list(parts))


def number(value: float) -> str:
    """Short decimal: 0.25, 12.3, 1.2e-05."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"


def _axes(series: list[Series], floor: float | None) -> Axes:
    xs = [x for one in series for x in one.x]
    ys = [y for one in series for y in (*one.y, *one.low, *one.high)] + ([] if floor is None else [floor])
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x0 == x1:
        x0, x1 = x0 - 0.5, x1 + 0.5
    if y0 == y1:
        pad = abs(y0) * 0.1 or 1.0
        y0, y1 = y0 - (0 if floor == y0 else pad), y1 + pad
    return Axes(x0=x0, x1=x1, y0=y0, y1=y1)


def _grid(axes: Axes, y_ticks: list[float]) -> str:
    parts = []
    for value in y_ticks:
        y = axes.py(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    whole = [value for value in ticks(axes.x0, axes.x1, 6) if axes.x0 <= value <= axes.x1 and value == int(value)]
    for value in whole:
        x = axes.px(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:g}</text>')
    return "".join(parts)


def _line(one: Series, axes: Axes, index: int) -> str:
    points = [(axes.px(x), axes.py(y)) for x, y in zip(one.x, one.y, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle class="f{index}" cx="{px:.1f}" cy="{py:.1f}" r="2.4"><title>step {x:g}: {escape(one.name)} '
        f"{number(y)}</title></circle>"
        for (px, py), x, y in zip(points, one.x, one.y, strict=True)
    )
    return f'<polyline class="s{index}" points="{path}"/>{dots}'


def _band(one: Series, axes: Axes, index: int) -> str:
    if len(one.x) == 1:
        x, y1, y2 = axes.px(one.x[0]), axes.py(one.low[0]), axes.py(one.high[0])
        return f'<line class="s{index}" x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
    up = [f"{axes.px(x):.1f},{axes.py(y):.1f}" for x, y in zip(one.x, one.high, strict=True)]
    down = [f"{axes.px(x):.1f},{axes.py(y):.1f}" for x, y in zip(one.x, one.low, strict=True)]
    return f'<polygon class="band f{index}" points="{" ".join(up + down[::-1])}"/>'


def _figure(title: str, unit: str, body: str, legend: list[str]) -> str:
    marks = "".join(f'<span><i class="b{index}"></i>{escape(name)}</span>' for index, name in enumerate(legend))
    shown_unit = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f"<figure><figcaption>{escape(title)}{shown_unit}<span class='legend'>{marks}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg></figure>'
    )
