"""A page of small charts as SVG, drawn by hand so that it needs nothing: latencies by share, and the run over time.

Refuses to know: where the numbers come from.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from math import floor, log10

from quire.bench.load.load_report import SLO
from quire.bench.load.runner import Phase

COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285", "#e67700", "#495057")
WIDTH, HEIGHT = 420, 230
LEFT, TOP, RIGHT, BOTTOM = 52, 30, 14, 36

Points = list[tuple[float, float]]


def draw(phases: list[Phase], slo: SLO, title: str) -> str:
    """Two rows of charts: how latencies spread, then what happened when."""
    done = [[r for r in phase.records if r.ok] for phase in phases]
    ttft = [_shares([r.ttft for r in rs if r.ttft is not None]) for rs in done]
    itl = [_shares([b - a for r in rs for a, b in pairwise(r.times)]) for rs in done]
    output = [_per_second([t for r in phase.records for t in r.times]) for phase in phases]
    good = [_per_second([r.end for r in phase.records if slo.met(r)]) for phase in phases]
    charts = [
        _chart("time to first token", "ms", "share of requests", ttft, line=slo.ttft and slo.ttft * 1000),
        _chart("gap between tokens", "ms", "share of gaps", itl, line=slo.tpot and slo.tpot * 1000),
        _chart("output", "seconds", "events with text / s", output),
        _chart("goodput", "seconds", "requests in time / s", good),
    ]
    names = [phase.name for phase in phases]
    height = 2 * HEIGHT + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for i, name in enumerate(names):
        x = LEFT + i * 790 / max(4, len(names))
        parts.append(f'<rect x="{x:.0f}" y="36" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="45">{escape(name)}</text>')
    for i, chart in enumerate(charts):
        parts.append(f'<g transform="translate({i % 2 * WIDTH},{60 + i // 2 * HEIGHT})">{chart}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _shares(seconds: list[float]) -> Points:
    """The cumulative distribution in milliseconds, thinned to what a chart can show."""
    ordered = sorted(seconds)
    picked = [*range(0, len(ordered), max(1, len(ordered) // 400)), len(ordered) - 1] if ordered else []
    return [(ordered[i] * 1000, (i + 1) / len(ordered)) for i in picked]


def _per_second(times: list[float]) -> Points:
    if not times:
        return []
    width = max(1.0, max(times) / 120)
    counts = [0] * (int(max(times) / width) + 1)
    for at in times:
        counts[int(max(0.0, at) / width)] += 1
    return [((i + 0.5) * width, count / width) for i, count in enumerate(counts)]


def _chart(title: str, x_unit: str, y_unit: str, series: list[Points], line: float | None = None) -> str:
    right = _round_up(max([x for points in series for x, _ in points] + [(line or 0.0) * 1.15], default=1.0))
    top = _round_up(max((y for points in series for _, y in points), default=1.0))
    plot_w, plot_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> str:
        return f"{LEFT + x / right * plot_w:.1f},{TOP + plot_h - y / top * plot_h:.1f}"

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-weight="bold">{escape(title)}</text>']
    for i in range(5):
        y = TOP + plot_h - i / 4 * plot_h
        x = LEFT + i / 4 * plot_w
        parts.append(f'<path d="M{LEFT} {y:.1f}h{plot_w}" stroke="#e3e6ea" fill="none"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{top * i / 4:g}</text>')
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + plot_h + 14}" text-anchor="middle" fill="#555">{right * i / 4:g}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end" fill="#555">{escape(x_unit)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{TOP - 10}" text-anchor="end" fill="#555">{escape(y_unit)}</text>')
    if line:
        x = LEFT + line / right * plot_w
        parts.append(f'<path d="M{x:.1f} {TOP}v{plot_h}" stroke="#c92a2a" stroke-dasharray="4 3" fill="none"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{TOP + 10}" fill="#c92a2a">SLO</text>')
    for i, points in enumerate(series):
        if points:
            path = " ".join(at(x, y) for x, y in points)
            colour = COLOURS[i % len(COLOURS)]
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 or 10 times a power of ten: axes that read well in quarters."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(power * step for step in (1, 2, 4, 8, 10) if power * step >= value * (1 - 1e-9))
