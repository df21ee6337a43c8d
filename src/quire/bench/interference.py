"""What one long prompt does to streams that are being answered: their gaps between tokens without it and beside it.

The prompt arrives when each of them has some tokens. Refuses to know: how the engine divides it.
"""

from __future__ import annotations

import msgspec

from quire.bench.offline import run_workload
from quire.bench.report import percentile
from quire.bench.workloads import Job, fixed
from quire.engine.link import Link
from quire.types.errors import ConfigError

ARRIVES_AFTER = 8  # tokens of each stream


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
    if n_out <= ARRIVES_AFTER:
        raise ConfigError(f"the prompt arrives when streams have {ARRIVES_AFTER} tokens: give them more")
    other = Job(fixed(1, prompt, 1, seed=seed + 3, vocab=vocab)[0].prompt, 1)
    warm_up = fixed(streams, n_in, 2 * ARRIVES_AFTER, seed=seed + 2, vocab=vocab)
    run_workload(link, [*warm_up, other], last_after=ARRIVES_AFTER)
    alone = run_workload(link, chat)
    beside = run_workload(link, [*chat, long], last_after=ARRIVES_AFTER)
    late = beside.traces[-1]
    during = [
        later - earlier
        for trace in beside.traces[:-1]
        for earlier, later in zip(trace.times, trace.times[1:], strict=False)
        if later > late.arrival and earlier < late.times[0]
    ]
    gaps = [gap for trace in alone.traces for gap in trace.gaps]
    return Interference(streams, prompt, _percentiles(gaps), _percentiles(during), late.ttft)


def _percentiles(gaps: list[float]) -> dict[str, float]:
    return {f"p{point}": percentile(gaps, point) for point in (50, 90, 99, 100)}
