"""What the engine tells the world: tokens, ends, and numbers about itself."""

from __future__ import annotations

import msgspec

from quire.types.counts import Counts
from quire.types.handover import HandoverStats
from quire.types.histogram import LATENCY, TOKENS, Histogram
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason


class TokenEvent(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one branch. `index` is the position of the first among the branch's outputs, so a receiver
    can drop what it already has. The last event of a branch carries `finish`; on ERROR, `error` names the class
    in types.errors (or nothing) and `message` says why."""

    request: str
    branch: int
    index: int
    tokens: list[int]
    finish: FinishReason | None = None
    counts: Counts | None = None  # with the first event, the last, and where there is something new
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str = ""
    message: str = ""
    embedding: list[float] | None = None  # of a request that asked for pooling
    score: float | None = None  # of an answer that beam search found
    forced: list[int] | None = None  # which of the tokens, by index, a grammar forced


# Why token rows were computed in vain: lost to preemption, drafts not accepted, abandoned by the caller, past their
# deadline, drawn beyond a stop, lost to a failed step, or there only to fill a captured size.
WASTE = ("recompute", "draft", "cancelled", "late", "overrun", "failed", "padding")


WAIT_RATIOS = (0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0)


def _latency() -> Histogram:
    return Histogram(LATENCY)


class TierStats(msgspec.Struct):
    """One tier below the device: what it holds now, and what it did since start."""

    name: str
    capacity: int = 0  # pages; 0: it looks after that itself
    pages: int = 0
    bytes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    pages_out: int = 0
    save_seconds: float = 0.0
    load_seconds: float = 0.0
    hit_tokens: int = 0  # prompt tokens that needed no computing because the tier delivered them
    missed: int = 0  # pages that were gone, damaged or foreign when asked for
    skipped: int = 0  # pages not saved because too many were on their way
    failed: int = 0  # pages that could not be stored


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters since start and gauges of now (`GAUGES`)."""

    steps: int = 0
    rows: int = 0  # token rows computed, padding included
    waste: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(WASTE, 0))
    step_seconds: float = 0.0
    sparse_bytes: int = 0  # that attention of rows with `sparse_pages` read
    sparse_bytes_of_all: int = 0  # ... and what it would have read of all pages
    exchanged_bytes: int = 0  # that a parallel rank sent to others
    prompt_tokens: int = 0
    cached_tokens: int = 0
    blended_tokens: int = 0  # of chunks, copied from another place
    recomputed_tokens: int = 0  # of chunks, computed again because their place changes them
    output_tokens: int = 0
    forced_tokens: int = 0  # ... of them, forced by a grammar: steps saved
    drafts: int = 0  # of one token or several
    drafted_tokens: int = 0  # draft tokens
    accepted_tokens: int = 0  # ... of them, right: steps saved
    accepted_at: list[int] = []  # ... of them, those at each position of their draft
    evicted_tokens: int = 0  # whose KV was dropped to keep a request's budget
    lengths_predicted: int = 0  # answers whose length was predicted, and that ended
    lengths_below_likely: int = 0  # ... of them, not longer than was likely: half, if predictions are calibrated
    lengths_below_high: int = 0  # ... and not longer than nine of ten should be
    met_slo: int = 0  # answers that ended well and met their targets, if there were any: goodput
    missed_ttft: int = 0  # ... that ended well, but later than the target for their first token allowed
    missed_tpot: int = 0  # ... or slower than that for each token
    gave_up: int = 0  # requests ended by the policy because they were too late already
    preemptions: int = 0
    preempted_most: int = 0  # most preemptions of one sequence
    finished: dict[str, int] = {}
    waiting: int = 0
    deferred: int = 0  # ... of them, for pages on their way or for a grammar, whatever room there is
    running: int = 0
    sleep_level: int = 0  # 0: awake; 1: weights wait in host memory; 2: they are to be loaded again
    pages_total: int = 0
    pages_used: int = 0  # referenced by a sequence
    pages_cached: int = 0  # free to take, but holding a known prefix
    states_total: int = 0  # cells for states of recurrent layers
    states_used: int = 0
    snapshots: int = 0  # cells free to take, but holding the state behind a known prefix
    pages_peak: int = 0
    kv_slots_allocated: int = 0  # token slots of pages given back so far
    kv_slots_filled: int = 0  # ... of them, filled
    kv_bytes: int = 0  # bytes of the whole page pool, of all ranks
    memory: int = 0  # bytes resident in the engine's process, and in those of its other ranks
    tiers: list[TierStats] = []
    tier_queries: int = 0  # tokens looked for in tiers: the device did not hold them
    tier_waits: float = 0.0  # seconds in which nothing could be computed because pages were being loaded
    tier_saved: float = 0.0  # estimated seconds of computing that pages from tiers saved, loading them subtracted
    handovers: HandoverStats | None = None  # of KV pages from and to other engines
    swaps: int = 0  # preemptions whose pages were kept in a tier rather than computed again
    wait_ratios: Histogram = msgspec.field(default_factory=lambda: Histogram(WAIT_RATIOS))  # real over predicted ones
    queue_time: Histogram = msgspec.field(default_factory=_latency)  # arrival to admission
    prefill_time: Histogram = msgspec.field(default_factory=_latency)  # admission to first token
    decode_time: Histogram = msgspec.field(default_factory=_latency)  # first token to last
    inference_time: Histogram = msgspec.field(default_factory=_latency)  # admission to last token
    request_preemptions: Histogram = msgspec.field(
        default_factory=lambda: Histogram(TOKENS)
    )  # of a sequence that ended
    step_tokens: Histogram = msgspec.field(default_factory=lambda: Histogram(TOKENS))

    def counted(self) -> EngineStats:
        """What stays true of an engine that has ended: its counters."""
        now = dict.fromkeys(GAUGES, 0)
        tiers = [msgspec.structs.replace(one, **dict.fromkeys(TIER_GAUGES, 0)) for one in self.tiers]
        return msgspec.structs.replace(self, tiers=tiers, **now)

    @property
    def acceptance(self) -> float:
        """Share of draft tokens that were accepted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens a step with a draft yields: the accepted ones, and the one every step samples."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def kv_waste(self) -> float:
        allocated = self.kv_slots_allocated
        return 1 - self.kv_slots_filled / allocated if allocated else 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


GAUGES = (
    "waiting", "deferred", "running", "sleep_level", "pages_total", "pages_used", "pages_cached", "states_total",
    "states_used", "snapshots", "pages_peak", "kv_bytes", "memory",
)  # fmt: skip
TIER_GAUGES = ("capacity", "pages", "bytes")
