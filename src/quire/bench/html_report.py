"""Reports as one HTML file: tables, and charts drawn as SVG by hand, so that it needs nothing else.

Refuses to know: where the numbers come from.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html import escape
from math import log10

WIDTH, LABEL, VALUE, BAR, PITCH = 640, 170, 90, 14, 22
COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#0b7285", "#e67700", "#495057")
STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:70em;color:#222}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .8em;text-align:left;border-bottom:1px solid #e3e6ea;vertical-align:top}"
    "svg{margin:.5em 1em 1em 0}"
)


def html_page(title: str, parts: Sequence[str]) -> str:
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"


def html_table(rows: Sequence[Sequence[str]], *, head: bool = True) -> str:
    """With a row of headings first, unless there are none."""
    lines = []
    for number, row in enumerate(rows):
        cell = "th" if head and number == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{escape(str(text))}</{cell}>" for text in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def bar_chart(title: str, unit: str, bars: Sequence[tuple[str, float | None]], *, log: bool = False) -> str:
    """One bar each, as long as its value; with `log`, as its order of magnitude above the least."""
    known = [value for _, value in bars if value is not None and value > 0]
    most, least = max(known, default=1.0), min(known, default=1.0)
    room, height = WIDTH - LABEL - VALUE, 34 + PITCH * len(bars)

    def length(value: float) -> float:
        if not log:
            return value / most * room
        return (0.05 + 0.95 * log10(value / least) / max(log10(most / least), 1e-9)) * room

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="4" y="18" font-weight="bold">{escape(title)}</text>',
        f'<text x="{WIDTH - 4}" y="18" text-anchor="end" fill="#555">{escape(unit)}{" (log)" if log else ""}</text>',
    ]
    for number, (name, value) in enumerate(bars):
        y, colour = 30 + PITCH * number, COLOURS[number % len(COLOURS)]
        size = length(value) if value is not None and value > 0 else 0.0
        shown = "-" if value is None else f"{value:.4g}"
        parts.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{size:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{LABEL + size + 6:.1f}" y="{y + 12}" fill="#333">{shown}</text>')
    return "".join([*parts, "</svg>"])


def stacked(charts: Sequence[str]) -> str:
    """Charts below each other, as one."""
    heights = [int(ElementTree.fromstring(chart).attrib["height"]) for chart in charts]
    tops = [sum(heights[:i]) for i in range(len(charts))]
    moved = [chart.replace("<svg ", f'<svg y="{top}" ', 1) for chart, top in zip(charts, tops, strict=True)]
    size = f'viewBox="0 0 {WIDTH} {sum(heights)}" width="{WIDTH}" height="{sum(heights)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(moved)}</svg>\n'
