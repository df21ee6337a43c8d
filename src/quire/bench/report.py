"""Numbers from a run, as a table for people and JSON for programs."""

from __future__ import annotations

import math
from typing import Any

from quire.bench.offline import Run, Trace

PERCENTILES = (50, 90, 99)


def percentile(values: list[float], p: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: list[float]) -> dict[str, float | None]:
    """Mean and percentiles; None of nothing, which JSON can say."""
    if not values:
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)))
    return {"mean": sum(values) / len(values), **{f"p{p}": percentile(values, p) for p in PERCENTILES}}


def speeds(traces: list[Trace], seconds: float) -> dict[str, Any]:
    """What any engine's run can be asked, counted the same way for all.

    Prefill ends and decode begins with the first token of the last stream to have one; tokens drawn before that
    count for neither rate.
    """
    inputs = sum(t.prompt for t in traces)
    outputs = sum(len(t.tokens) for t in traces)
    turn = max(t.ttft for t in traces)
    later = sum(at > turn for t in traces for at in t.times)
    end = max(t.end for t in traces)
    return {
        "input_tokens": inputs,
        "output_tokens": outputs,
        "output_tok_s": outputs / seconds,
        "total_tok_s": (inputs + outputs) / seconds,
        "prefill_tok_s": inputs / turn,
        "decode_tok_s": later / (end - turn) if later else None,
        "ttft_s": spread([t.ttft for t in traces]),
        "tpot_s": spread([t.tpot for t in traces if t.tpot is not None]),
        "itl_s": spread([gap for t in traces for gap in t.gaps]),
    }


def summarise(run: Run) -> dict[str, Any]:
    """Everything `quire bench throughput` reports."""
    stats = run.stats
    return {
        "requests": len(run.traces),
        "seconds": run.seconds,
        **speeds(run.traces, run.seconds),
        "host_share": run.host_share,
        "prefix_hit_rate": stats.hit_rate,
        "kv_pages_peak": stats.pages_peak,
        "kv_pages_total": stats.pages_total,
        "kv_waste": stats.kv_waste,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        "kv_bytes": stats.kv_bytes,
        "peak_memory_bytes": run.peak_memory,
    }


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (what, figure) lines."""

    def times(name: str) -> str:
        return "  ".join(f"{k} {v * 1000:.1f}" for k, v in summary[name].items() if v is not None) or "-"

    mib = 1 << 20
    pages = f"{summary['kv_pages_peak']} of {summary['kv_pages_total']}"
    decode, host = summary["decode_tok_s"], summary["host_share"]
    return [
        ("requests", f"{summary['requests']} in {summary['seconds']:.2f} s, {summary['steps']} steps"),
        ("output", f"{summary['output_tok_s']:.1f} tok/s"),
        ("input + output", f"{summary['total_tok_s']:.1f} tok/s"),
        ("prefill", f"{summary['prefill_tok_s']:.1f} tok/s, to the last stream's first token"),
        ("decode", f"{decode:.1f} tok/s, from there on" if decode else "-"),
        ("TTFT ms", times("ttft_s")),
        ("TPOT ms", times("tpot_s")),
        ("ITL ms", times("itl_s")),
        ("prefix hit rate", f"{summary['prefix_hit_rate']:.1%}"),
        ("KV pages, peak", pages),
        ("KV waste", f"{summary['kv_waste']:.2%} of allocated slots never filled"),
        ("preemptions", str(summary["preemptions"])),
        ("host share", f"{host:.1%} of the time outside the model" if host is not None else "-"),
        ("peak memory", f"{summary['peak_memory_bytes'] / mib:.0f} MiB, KV pool {summary['kv_bytes'] / mib:.0f} MiB"),
    ]
