"""What simulations come to, as pages with charts. Refuses to know: how they were simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.html_report import bar_chart, html_page, html_table
from quire.simulation.comparison import Cell
from quire.simulation.figures import rows_of


def figures_html(title: str, summary: dict[str, Any]) -> str:
    """The summary as a page with charts."""
    times = {"ttft_s": "time to first token", "tpot_s": "time per output token", "itl_s": "gap between tokens"}
    charts = [bar_chart(name, "s", list(summary[key].items())) for key, name in times.items()]
    charts.append(bar_chart("time to last token", "s", list(summary["ttlt_s"].items())))
    rates = [("offered in time", summary["goodput_rps"]), ("finished", summary["throughput_rps"])]
    return html_page(title, [html_table(rows_of(summary), head=False), bar_chart("requests", "per s", rates), *charts])


def comparison_html(cells: Sequence[Cell]) -> str:
    """Policies beside each other: for each workload and load, bars of goodput and of the tails."""
    parts: list[str] = []
    for name, load in dict.fromkeys((cell.workload, cell.load) for cell in cells):
        own = [cell for cell in cells if (cell.workload, cell.load) == (name, load)]
        rows = [("policy", *own[0].figures)]
        rows += [(cell.contender, *(f"{value:.3f}" for value in cell.figures.values())) for cell in own]
        parts.append(html_table(rows))
        for figure, unit in (("goodput_rps", "requests per s"), ("ttft_p99", "s"), ("ttlt_p99", "s")):
            bars = [(cell.contender, cell.figures[figure]) for cell in own]
            parts.append(bar_chart(f"{name} at {load:.0%}: {figure}", unit, bars))
    return html_page("Policies beside each other", parts)
