"""Figures of a phase of load: latencies, throughput, goodput against an SLO, and where computed rows went.

    SLO goodput       requests per second that ended well and in time; refused, failed and late ones count against it
    compute goodput   tokens delivered in time per token row the server computed (above 1: the prefix cache helped)

Refuses to know: how the load was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.bench.load.runner import Phase, Record
from quire.bench.load.scrape import growth
from quire.bench.report import spread
from quire.types.errors import ConfigError


@dataclass(frozen=True)
class SLO:
    """What a user would call fast enough, in seconds; None: no bound."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, record: Record) -> bool:
        if not record.ok or record.ttft is None:
            return False
        late = self.ttft is not None and record.ttft > self.ttft
        slow = self.tpot is not None and record.tpot is not None and record.tpot > self.tpot
        return not (late or slow)

    def __str__(self) -> str:
        bounds = [f"{k} {v * 1000:g} ms" for k, v in (("TTFT", self.ttft), ("TPOT", self.tpot)) if v is not None]
        return ", ".join(bounds) or "none"


PRESETS = {"chat": SLO(ttft=0.5), "completion": SLO(ttft=0.1)}


def parse_slo(text: str) -> SLO:
    """chat, completion, or `ttft=500,tpot=50` in milliseconds."""
    if text in PRESETS:
        return PRESETS[text]
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            bounds[name.strip()] = float(value.strip().removesuffix("ms")) / 1000
        except ValueError:
            bounds["?"] = 0.0
    if not bounds.keys() <= {"ttft", "tpot"}:
        raise ConfigError(f"cannot read the SLO {text!r}; write chat, completion, or ttft=500,tpot=50 (milliseconds)")
    return SLO(**bounds)


def summarise(phase: Phase, slo: SLO) -> dict[str, Any]:
    done = [r for r in phase.records if r.ok]
    refused = [r for r in phase.records if r.refused]
    good = [r for r in phase.records if slo.met(r)]
    seconds = phase.seconds or 1e-9
    outputs = sum(r.answer.tokens for r in done)
    failed = len(phase.records) - len(done) - len(refused)
    return {
        "phase": phase.name,
        "offered_req_s": phase.offered,
        "requests": len(phase.records),
        "completed": len(done),
        "refused": len(refused),
        "failed": failed,
        "errors": _errors(phase.records),
        "seconds": phase.seconds,
        "req_s": len(done) / seconds,
        "output_tok_s": outputs / seconds,
        "total_tok_s": (outputs + sum(r.prompt for r in done)) / seconds,
        "ttft_s": spread([r.ttft for r in done if r.ttft is not None]),
        "itl_s": spread([b - a for r in done for a, b in pairwise(r.times)]),
        "tpot_s": spread([r.tpot for r in done if r.tpot is not None]),
        "e2e_s": spread([r.end - r.due for r in done]),
        "client_lag_s": spread([r.sent - r.due for r in phase.records if r.sent >= r.due]),
        "slo": str(slo),
        "goodput_req_s": len(good) / seconds,
        "goodput_tok_s": sum(r.answer.tokens for r in good) / seconds,
        "slo_share": len(good) / len(phase.records) if phase.records else None,
        "refusal_s": spread([r.end - r.sent for r in refused]),
        "refusals_with_retry_after": sum(r.answer.retry_after is not None for r in refused) / max(1, len(refused)),
        "compute": _compute(phase, good),
    }


def _errors(records: list[Record]) -> dict[str, int]:
    """What went wrong, the most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        if not record.ok and not record.refused:
            what = record.answer.error or f"HTTP {record.answer.status}: {record.answer.body[:160]!r}"
            counts[what] = counts.get(what, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:8])


def _compute(phase: Phase, good: list[Record]) -> dict[str, Any] | None:
    """What the server computed for it, from its metrics; None if it has none of ours."""
    before, after = phase.before, phase.after
    if before is None or after is None or "quire_token_rows_total" not in after.values:
        return None
    rows = growth(before, after, "quire_token_rows_total")
    joules = growth(before, after, "quire_energy_joules_total")
    delivered = sum(r.prompt + r.answer.tokens for r in good)
    waste = {cause: after.waste[cause] - before.waste.get(cause, 0.0) for cause in after.waste}
    late = sum(r.prompt - r.answer.cached + r.answer.tokens for r in phase.records if r.ok) - sum(
        r.prompt - r.answer.cached + r.answer.tokens for r in good
    )
    waste["late"] = waste.get("late", 0.0) + late  # those the server finished, but past the SLO
    return {
        "rows": rows,
        "goodput": delivered / rows if rows else None,
        "waste": waste,
        "waste_share": sum(waste.values()) / rows if rows else None,
        "joules": joules or None,
        "joules_per_token": joules / out if joules and (out := sum(r.answer.tokens for r in phase.records)) else None,
        "memory_bytes": {name: [before.memory.get(name), value] for name, value in after.memory.items()},
    }


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A phase as (what, figure) lines."""

    def times(name: str) -> str:
        return "  ".join(f"{k} {v * 1000:.1f}" for k, v in summary[name].items() if v is not None) or "-"

    offered = summary["offered_req_s"]
    ended = f"{summary['completed']} of {summary['requests']} in {summary['seconds']:.1f} s"
    lines = [
        (f"[bold]{summary['phase']}[/bold]", f"offered {offered:.2f} req/s" if offered else "closed loop"),
        ("completed", f"{ended}, {summary['refused']} refused, {summary['failed']} failed"),
        ("throughput", f"{summary['req_s']:.2f} req/s, {summary['output_tok_s']:.1f} output tok/s, "
                       f"{summary['total_tok_s']:.1f} input + output tok/s"),
        ("TTFT ms", times("ttft_s")),
        ("ITL ms", times("itl_s")),
        ("TPOT ms", times("tpot_s")),
        ("end to end ms", times("e2e_s")),
        (f"goodput ({summary['slo']})", f"{summary['goodput_req_s']:.2f} req/s, {summary['goodput_tok_s']:.1f} tok/s, "
                                        f"{summary['slo_share'] or 0:.1%} of what was offered"),
    ]  # fmt: skip
    if summary["refused"]:
        share = summary["refusals_with_retry_after"]
        lines.append(("refusals ms", f"{times('refusal_s')}; {share:.1%} with Retry-After"))
    lines += _compute_rows(summary["compute"])
    lines += [("failure", f"{count} x {what}") for what, count in summary["errors"].items()]
    lag = summary["client_lag_s"]["p99"]
    if lag is not None and lag > 0.005:
        lines.append(("generator lag ms", times("client_lag_s")))
    return lines


def _compute_rows(compute: dict[str, Any] | None) -> list[tuple[str, str]]:
    if compute is None:
        return [("compute goodput", "- (no Quire metrics there)")]
    causes = ", ".join(f"{cause} {count:.0f}" for cause, count in compute["waste"].items() if count)
    goodput, share = compute["goodput"], compute["waste_share"]
    lines = [
        ("compute goodput", f"{goodput:.3f} tokens in time per row, {compute['rows']:.0f} rows" if goodput else "-"),
        ("rows wasted", f"{share:.2%}" + (f": {causes}" if causes else "") if share is not None else "-"),
    ]
    if compute["joules_per_token"]:
        lines.append(("energy", f"{compute['joules_per_token']:.3f} J per output token"))
    memory = [f"{n} {(a or 0) / 2**20:.0f} to {b / 2**20:.0f} MiB" for n, (a, b) in compute["memory_bytes"].items()]
    return [*lines, ("server memory", ", ".join(memory))] if memory else lines
