"""What a service is asked: lengths, prefixes, bursts, tenants; which settings suit that; what a million tokens cost.

From a trace, or from the server's own log (`quire serve --log-format json`). Refuses to know: engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, pstdev
from typing import Any

from quire.bench.report import percentile
from quire.simulation.planning import capacity_rps, replicas_for, shared_tokens
from quire.simulation.traces import Arrival
from quire.types.cost_model import CostModel

LOAD = 0.7  # of capacity, that replicas are suggested for
PEAK_WINDOW_S = 60.0
BURSTY = 1.5  # variation of gaps above which arrivals come in bursts; 1 is a Poisson process


@dataclass(frozen=True)
class Rates:
    """What a replica costs to run."""

    usd_per_hour: float = 0.0
    watts: float = 0.0
    gco2e_per_kwh: float = 0.0


def profile(trace: Sequence[Arrival], model: CostModel, rates: Rates) -> dict[str, Any]:
    span = max(trace[-1].at - trace[0].at, 1e-9)
    gaps = [b.at - a.at for a, b in pairwise(trace)]
    prompts, outputs = [float(one.prompt) for one in trace], [float(one.outputs) for one in trace]
    hits = [max(one.cached, hit) for one, hit in zip(trace, shared_tokens(trace), strict=True)]
    windows = Counter(int((one.at - trace[0].at) / PEAK_WINDOW_S) for one in trace)
    peak = max(windows.values()) / min(PEAK_WINDOW_S, span)
    tenants = Counter(one.tenant for one in trace)
    found: dict[str, Any] = {
        "requests": len(trace),
        "seconds": span,
        "rate_rps": len(trace) / span,
        "peak_rps": peak,
        "burstiness": pstdev(gaps) / mean(gaps) if len(gaps) > 1 and mean(gaps) else None,
        "prompt_tokens": _spread(prompts),
        "output_tokens": _spread(outputs),
        "prefix_share": sum(hits) / sum(prompts),
        "tenants": len(tenants),
        "largest_tenant_share": max(tenants.values()) / len(trace),
        "capacity_rps": capacity_rps(model, trace),
        "replicas": replicas_for(model, trace, peak, LOAD),
    }
    found["settings"] = _settings(found, trace)
    found["costs"] = _costs(found, sum(prompts) + sum(outputs), sum(outputs), rates)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "mean": mean(values),
        **{f"p{p}": percentile(values, p) for p in (50, 90, 99)},
        "max": max(values),
    }


def _settings(found: dict[str, Any], trace: Sequence[Arrival]) -> dict[str, str]:
    """Options of `quire serve`, each with why."""
    longest = max(one.prompt + one.outputs for one in trace)
    settings = {"max_model_len": f"{-(-longest // 1024) * 1024} (the longest request has {longest} tokens)"}
    uneven = found["prompt_tokens"]["p99"] > 8 * found["prompt_tokens"]["p50"]
    targets = any(one.ttft or one.tpot for one in trace)
    if targets or uneven or (found["burstiness"] or 0) > BURSTY:
        why = "requests have targets" if targets else "short prompts wait behind long ones" if uneven else "bursts"
        settings["scheduler"] = f"auto ({why})"
    elif found["tenants"] > 1:
        settings["scheduler"] = f"fair ({found['tenants']} tenants)"
    elif found["prefix_share"] > 0.5:
        settings["scheduler"] = f"lpm ({found['prefix_share']:.0%} of prompt tokens are shared prefixes)"
    else:
        settings["scheduler"] = "fcfs (nothing to choose between)"
    if found["prefix_share"] < 0.01:
        settings["prefix_cache"] = "makes no difference: hardly any prefix is shared"
    return settings


def _costs(found: dict[str, Any], tokens: float, outputs: float, rates: Rates) -> dict[str, float]:
    """Of a million tokens, at this traffic over the suggested replicas."""
    hours = found["replicas"] * found["seconds"] / 3600
    kwh = hours * rates.watts / 1000
    whole = {"usd": hours * rates.usd_per_hour, "kwh": kwh, "gco2e": kwh * rates.gco2e_per_kwh}
    given = {name: value for name, value in whole.items() if value}
    return {
        f"{name}_per_million_{kind}": 1e6 * value / count
        for name, value in given.items()
        for kind, count in (("tokens", tokens), ("output_tokens", outputs))
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The profile as (what, figure) lines."""

    def lengths(name: str) -> str:
        return "  ".join(f"{key} {value:.0f}" for key, value in found[name].items())

    burst = found["burstiness"]
    return [
        ("requests", f"{found['requests']} in {found['seconds']:.0f} s: {found['rate_rps']:.3f} req/s, "
                     f"{found['peak_rps']:.3f} in the busiest minute"),
        ("burstiness", "-" if burst is None else f"{burst:.2f} (variation of gaps; 1 is a Poisson process)"),
        ("prompt tokens", lengths("prompt_tokens")),
        ("output tokens", lengths("output_tokens")),
        ("shared prefixes", f"{found['prefix_share']:.1%} of prompt tokens"),
        ("tenants", f"{found['tenants']}, the largest with {found['largest_tenant_share']:.0%} of requests"),
        ("one replica serves", f"about {found['capacity_rps']:.2f} req/s of this"),
        ("replicas", f"{found['replicas']}, at {LOAD:.0%} of capacity in the busiest minute"),
        *((f"suggested {name}", why) for name, why in found["settings"].items()),
        *((name.replace("_", " "), f"{value:.4g}") for name, value in found["costs"].items()),
    ]  # fmt: skip
