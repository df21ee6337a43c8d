"""What a simulation comes to: latencies, goodput, throughput, hits, by request and by tenant; as rows for people.

Refuses to know: how it was simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.simulation.records import Result
from quire.simulation.replica import START

Column = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Targets:
    """What counts as good where a request has no targets of its own, in seconds; None: anything."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, rows: dict[str, Column]) -> npt.NDArray[np.bool_]:
        ttft = np.where(rows["ttft_target"] > 0, rows["ttft_target"], np.inf if self.ttft is None else self.ttft)
        tpot = np.where(rows["tpot_target"] > 0, rows["tpot_target"], np.inf if self.tpot is None else self.tpot)
        met: npt.NDArray[np.bool_] = (rows["ttft"] <= ttft) & (_tpot(rows) <= tpot)
        return met


def _tpot(rows: dict[str, Column]) -> Column:
    """Of answers of one token, 0."""
    found: Column = (rows["ttlt"] - rows["ttft"]) / np.maximum(rows["outputs"] - 1, 1)
    return found


def spread(values: Column) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)))
    points = np.percentile(values, PERCENTILES)
    return {"mean": float(values.mean()), **{f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}}


def summarise(result: Result, requests: int, targets: Targets) -> dict[str, Any]:
    rows = {name: np.frombuffer(column, dtype=np.float64) for name, column in result.rows.items()}
    done = len(rows["ttft"])
    seconds = max(result.end - START, 1e-9)
    good = targets.met(rows)
    tpot = _tpot(rows)[rows["outputs"] > 1]
    return {
        "requests": requests,
        "finished": done,
        "refused": result.refused,
        "lost": result.lost,
        "seconds": seconds,
        "goodput_rps": float(good.sum()) / seconds,
        "slo_share": float(good.sum()) / requests if requests else None,
        "throughput_rps": done / seconds,
        "throughput_tok_s": result.output_tokens / seconds,
        "ttft_s": spread(rows["ttft"]),
        "tpot_s": spread(tpot),
        "itl_s": result.gaps.spread(),
        "ttlt_s": spread(rows["ttlt"]),
        "hit_rate": result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0,
        "wait_error": _wait_error(rows),
        "max_wait_s": float(rows["wait"].max()) if done else None,
        "preemptions": result.preemptions,
        "steps": result.steps,
        "busy_s": result.busy,
        "replica_s": result.replica_seconds,
        "replicas_peak": result.replicas_peak,
        "prefill_peak": result.prefill_peak,
        "role_switches": result.role_switches,
        "tenants": _tenants(result, rows, good),
    }


def _wait_error(rows: dict[str, Column]) -> dict[str, float | None]:
    """By which factor predicted waits for a first token were off, up or down."""
    made = (rows["predicted"] > 0) & (rows["waited"] > 0)
    return spread(np.exp(np.abs(np.log(rows["waited"][made] / rows["predicted"][made]))))


def _tenants(result: Result, rows: dict[str, Column], good: npt.NDArray[np.bool_]) -> dict[str, Any]:
    if len(result.tenants) < 2:
        return {}
    whole = sum(result.served.values()) or 1
    found = {}
    for number, name in enumerate(result.tenants):
        own = rows["tenant"] == number
        found[name] = {
            "finished": int(own.sum()),
            "slo_share": float(good[own].mean()) if own.any() else None,
            "ttft_s": spread(rows["ttft"][own]),
            "ttlt_s": spread(rows["ttlt"][own]),
            "token_share": result.served.get(name, 0) / whole,
        }
    return found


def mean_of(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summaries of several seeds as one: the mean of every figure that all of them have."""

    def mean(values: Sequence[Any]) -> Any:
        if all(isinstance(value, dict) for value in values):
            names = [name for name in values[0] if all(name in value for value in values)]
            return {name: mean([value[name] for value in values]) for name in names}
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    found: dict[str, Any] = mean(summaries)
    return found if len(summaries) > 1 else summaries[0]


def rows_of(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (what, figure) lines."""

    def times(name: str) -> str:
        return "  ".join(f"{k} {v:.3f}" for k, v in summary[name].items() if v is not None) or "-"

    refused = sum(summary["refused"].values())
    wait = summary["max_wait_s"]
    return [
        ("finished", f"{summary['finished']:.0f} of {summary['requests']:.0f} in {summary['seconds']:.1f} s, "
                     f"{refused:.0f} refused"),
        ("goodput", f"{summary['goodput_rps']:.3f} req/s, {summary['slo_share'] or 0:.1%} of what was offered"),
        ("throughput", f"{summary['throughput_rps']:.3f} req/s, {summary['throughput_tok_s']:.1f} output tok/s"),
        ("TTFT s", times("ttft_s")),
        ("TPOT s", times("tpot_s")),
        ("ITL s", times("itl_s")),
        ("time to last token s", times("ttlt_s")),
        ("prefix hit rate", f"{summary['hit_rate']:.1%}"),
        ("longest wait", "-" if wait is None else f"{wait:.2f} s"),
        ("predicted waits off by", times("wait_error").replace("  ", " x  ") + " x"),
        ("preemptions", f"{summary['preemptions']:.0f}"),
        ("replicas", f"{summary['replicas_peak']:.0f} at most, {summary['replica_s'] / 3600:.2f} replica-hours"),
        ("prefill replicas", f"{summary['prefill_peak']:.0f} at most, {summary['role_switches']:.0f} changes of role"),
        *(
            (
                f"tenant {name or '(none)'}",
                f"{one['finished']:.0f} finished, TTFT p99 {one['ttft_s']['p99'] or 0:.3f} s, "
                f"{one['token_share']:.1%} of token rows",
            )
            for name, one in summary["tenants"].items()
        ),
    ]  # fmt: skip
