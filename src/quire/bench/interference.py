"""What one long prompt does to streams that are being answered: their gaps between tokens without it and beside it.

Both runs submit everything at once. Refuses to know: how the engine divides the prompt.
"""

from __future__ import annotations

import msgspec

from quire.bench.offline import run_workload
from quire.bench.report import percentile
from quire.bench.workloads import Job, fixed
from quire.engine.link import Link
from quire.types.errors import ConfigError


class Interference(msgspec.Struct):
    """Seconds. `alone`, `beside`: percentiles (50, 90, 99, 100) of the streams' gaps between tokens."""

    streams: int
    prompt: int
    alone: dict[str, float]
    beside: dict[str, float]
    long_ttft: float


def interference(link: Link, *, streams: int, prompt: int, n_in: int, n_out: int, seed: int = 1) -> Interference:
    vocab = link.info.vocab_size
    chat = fixed(streams, n_in, n_out, seed=seed, vocab=vocab)
    long = Job(fixed(1, prompt, 1, seed=seed + 1, vocab=vocab)[0].prompt, 1)
    run_workload(link, fixed(streams, n_in, 8, seed=seed + 2, vocab=vocab))
    alone = run_workload(link, chat)
    beside = run_workload(link, [*chat, long])
    end = beside.traces[-1].ttft
    during = [
        later - earlier
        for trace in beside.traces[:-1]
        for earlier, later in zip(trace.times, trace.times[1:], strict=False)
        if earlier < end
    ]
    if not during:
        raise ConfigError(f"a prompt of {prompt} tokens is done before any stream has two tokens; give a longer one")
    return Interference(
        streams, prompt, _percentiles([g for t in alone.traces for g in t.gaps]), _percentiles(during), end
    )


def _percentiles(gaps: list[float]) -> dict[str, float]:
    return {f"p{point}": percentile(gaps, point) for point in (50, 90, 99, 100)}
