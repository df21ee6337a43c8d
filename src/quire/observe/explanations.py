"""Explaining a request: its timelines and ledger entry as a report in seconds and sentences.

Refuses to know: where these come from, who may see them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.observe.ledger import Entry
from quire.types.timeline import PrefixOutcome, Timeline

SENTENCES = {
    PrefixOutcome.FULL: "all that can be shared was in the cache; the last token is always computed",
    PrefixOutcome.NEW: "the tokens of the first missing page had not been computed here before",
    PrefixOutcome.EVICTED: "the first missing page had been computed, but made room for other requests",
    PrefixOutcome.SALT: "the same tokens are known, but under another cache salt or adapter, and these do not share",
    PrefixOutcome.WINDOW: "the page is cached, but pages of a sliding window before it are gone",
    PrefixOutcome.STATE: "the page is cached, but the states of recurrent layers are not, so far into the prompt",
    PrefixOutcome.SHORT: "the prompt is too short to fill a page, and no cached page begins with it",
    PrefixOutcome.SCORED: "prompt logprobs, a mean over the prompt or accumulated attention need every position",
    PrefixOutcome.BUDGET: "what follows depends on what the request's KV budget evicts, so it is computed",
    PrefixOutcome.OFF: "the prefix cache is off",
}


class Prefix(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    cached_tokens: int
    page_tokens: int
    cached_pages: int
    paged_tokens: int  # that pages alone would have served
    state_snapshot_tokens: int | None  # behind which recurrent layers went on from a snapshot; null: no such layers
    first_missing_page: int | None
    first_missing_tokens: list[int] | None  # positions from .. to, of the prompt
    reason: str
    explanation: str
    evicted_before_s: float | None  # how long before the request came, if evicted
    evicted_for: str | None  # which request took the page; told to those who may see all requests
    tier_tokens: dict[str, int]  # of the cached tokens, those that came from each tier below the device
    moved_bytes: int  # loaded for that
    blended_tokens: int  # of chunks, whose KV was computed for another place and copied
    recomputed_tokens: int  # ... of them, computed again because their place changes them
    blend_error: float | None  # deviation of the others, relative to the values of all; None: it was not looked at
    saved_s: float  # estimate: computing them would have taken so much longer


class Chunk(msgspec.Struct):
    after_s: float  # since the request arrived
    tokens: int


class Stall(msgspec.Struct):
    after_s: float
    lost_s: float
    pages_lost_tokens: int
    recomputed_tokens: int


class Branch(msgspec.Struct, kw_only=True):
    index: int
    state: str  # queued, prefill, decode, preempted, or how it finished
    output_tokens: int
    expected_tokens: list[float]  # that were likely, and that nine of ten stay below; empty: nobody asked
    evicted_tokens: int  # whose KV was dropped to keep the request's budget
    forced_tokens: int  # of them, forced by a grammar: steps saved
    drafted_tokens: int  # by speculation
    accepted_tokens: int  # ... of them, right: steps saved
    predicted_wait_s: float | None  # to the first token, from when it was queued; null: nothing was known
    queue_s: float  # being admitted, waiting for a slot and pages
    pending_s: float  # of queue_s, waiting for pages another request was computing or loading
    prefill_s: float
    decode_s: float
    preempted_s: float
    prefill_chunks: list[Chunk]
    preemptions: list[Stall]


class Explanation(msgspec.Struct, kw_only=True):
    id: str
    request_id: str
    object: str = "request.explanation"
    state: str
    error: str | None
    total_s: float
    prepare_s: float  # parsing, rendering, tokenising
    time_to_first_token_s: float | None
    branches: list[Branch]
    prefix: Prefix | None


def explain(entry: Entry, timelines: list[Timeline], now: float, *, others: bool) -> Explanation:
    """`others`: whether the reader may learn that another tenant's request had the same prefix."""
    meter = entry.meter
    reported = next((t for t in timelines if t.prefix is not None), None)
    return Explanation(
        id=entry.request,
        request_id=entry.call,
        state="ended" if entry.ended else "running",
        error=entry.error or None,
        total_s=entry.seconds(),
        prepare_s=entry.ready - entry.arrived,
        time_to_first_token_s=meter.first - meter.started if meter.first else None,
        branches=[_branch(timeline, now) for timeline in sorted(timelines, key=lambda t: t.branch)],
        prefix=_prefix(reported, others) if reported is not None else None,
    )


def phases(timeline: Timeline, now: float) -> dict[str, tuple[float, float]]:
    """Name → (from, to) of the stretches of a sequence's life that have begun."""
    end = timeline.ended or now
    found = {"queue": (timeline.arrival, timeline.admitted or end)}
    if timeline.admitted:
        found["prefill"] = (timeline.admitted, timeline.first_token or end)
    if timeline.first_token:
        found["decode"] = (timeline.first_token, end)
    return found


def _branch(timeline: Timeline, now: float) -> Branch:
    end = timeline.ended or now
    lasted = {name: to - since for name, (since, to) in phases(timeline, now).items()}
    stalls = [(p, (p.resumed or end) - p.at) for p in timeline.preemptions]
    stalled = {
        name: sum(s for p, s in stalls if (p.at >= timeline.first_token > 0) == (name == "decode"))
        for name in ("prefill", "decode")
    }
    return Branch(
        index=timeline.branch,
        state=timeline.finish or _state(timeline),
        output_tokens=timeline.outputs,
        expected_tokens=list(timeline.expected) if timeline.expected[1] else [],
        evicted_tokens=timeline.evicted,
        forced_tokens=timeline.forced,
        drafted_tokens=timeline.drafted,
        accepted_tokens=timeline.accepted,
        predicted_wait_s=timeline.predicted_wait or None,
        queue_s=lasted["queue"],
        pending_s=timeline.pending,
        prefill_s=lasted.get("prefill", 0.0) - stalled["prefill"],
        decode_s=lasted.get("decode", 0.0) - stalled["decode"],
        preempted_s=sum(stalled.values()),
        prefill_chunks=[Chunk(at - timeline.arrival, tokens) for at, tokens in timeline.chunks],
        preemptions=[Stall(p.at - timeline.arrival, s, p.computed, p.recomputed) for p, s in stalls],
    )


def _state(timeline: Timeline) -> str:
    if timeline.preemptions and not timeline.preemptions[-1].resumed:
        return "preempted"
    return "decode" if timeline.first_token else "prefill" if timeline.admitted else "queued"


def _prefix(timeline: Timeline, others: bool) -> Prefix:
    reason, size = timeline.prefix, max(1, timeline.page_size)
    assert reason is not None
    if reason is PrefixOutcome.SALT and not others:
        reason = PrefixOutcome.NEW  # that another tenant asked the same is not this reader's to know
    page = timeline.cached // size
    missing = reason in (PrefixOutcome.NEW, PrefixOutcome.EVICTED, PrefixOutcome.SALT, PrefixOutcome.WINDOW)
    return Prefix(
        prompt_tokens=timeline.prompt,
        cached_tokens=timeline.cached,
        page_tokens=size,
        cached_pages=page,
        paged_tokens=timeline.paged,
        state_snapshot_tokens=timeline.snapshot if timeline.snapshot >= 0 else None,
        first_missing_page=page if missing else None,
        first_missing_tokens=[timeline.cached, min(timeline.prompt, (page + 1) * size)] if missing else None,
        reason=reason.value,
        explanation=SENTENCES[reason],
        evicted_before_s=timeline.arrival - timeline.gone_at if timeline.gone_at else None,
        evicted_for=(timeline.gone_for or None) if others else None,
        tier_tokens=timeline.tiers,
        moved_bytes=timeline.moved,
        blended_tokens=timeline.blended,
        recomputed_tokens=timeline.recomputed,
        blend_error=timeline.blend_error,
        saved_s=timeline.saved,
    )


def attributes(entry: Entry) -> dict[str, Any]:
    """What a trace says of a request, under OpenTelemetry's names for generative models."""
    meter = entry.meter
    return {
        "gen_ai.operation.name": "generate",
        "gen_ai.system": "quire",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.id": entry.request,
        "gen_ai.response.finish_reasons": meter.reasons,
        "gen_ai.usage.input_tokens": entry.prompt,
        "gen_ai.usage.output_tokens": meter.tokens,
        "quire.cached_tokens": meter.cached,
        "quire.request_id": entry.call,
    }
