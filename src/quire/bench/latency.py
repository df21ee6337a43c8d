"""One stream: how long until its first token, and how long between tokens after that."""

from __future__ import annotations

from typing import Any

from quire.bench.offline import Run, Trace
from quire.bench.report import spread


def latencies(runs: list[Run]) -> dict[str, Any]:
    """Figures over repeats of the same work; every gap of every repeat counts."""
    traces: list[Trace] = [trace for run in runs for trace in run.traces]
    ttft = spread([t.ttft for t in traces])
    tpot = spread([t.tpot for t in traces if t.tpot is not None])
    assert ttft["p50"] is not None
    return {
        "repeats": len(runs),
        "input_tokens": traces[0].prompt,
        "output_tokens": len(traces[0].tokens),
        "prefill_tok_s": traces[0].prompt / ttft["p50"],
        "decode_tok_s": 1 / tpot["p50"] if tpot["p50"] else None,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "itl_s": spread([gap for t in traces for gap in t.gaps]),
    }


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (what, figure) lines."""

    def times(name: str) -> str:
        return "  ".join(f"{k} {v * 1000:.2f}" for k, v in summary[name].items() if v is not None) or "-"

    decode = summary["decode_tok_s"]
    return [
        ("one stream", f"{summary['input_tokens']} in, {summary['output_tokens']} out, {summary['repeats']} times"),
        ("TTFT ms", times("ttft_s")),
        ("prefill", f"{summary['prefill_tok_s']:.1f} tok/s"),
        ("time per token ms", times("itl_s")),
        ("decode", f"{decode:.1f} tok/s" if decode else "-"),
    ]
