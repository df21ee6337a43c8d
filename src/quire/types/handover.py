"""A hand-over of KV pages from one engine to another, as data: prefill-decode disaggregation and live migration.

    source (has or computes the pages) ◄── wants these pages ── target (has device pages reserved for them)
                                       ── each page as it is computed ──►

The target asks, so nothing comes that it has no room for; what has not come in time it computes itself.
"""

from __future__ import annotations

import msgspec


class Handover(msgspec.Struct, frozen=True, omit_defaults=True):
    """On a request: its pages are handed over. `source`: the address of the engine they come from; empty at that engine
    itself, whose request computes them."""

    id: str  # drawn by whoever arranges it: nobody else can guess it
    source: str = ""
    timeout: float = 10.0  # seconds without a page after which the target computes what is missing
    waits: bool = True  # for what the source is still computing; else it gives what it has


class HandoverStats(msgspec.Struct, kw_only=True):
    """Counters of one engine's connector."""

    started: int = 0  # hand-overs that this engine asked for
    completed: int = 0  # ... of them, those whose pages all came
    remote_prefills: int = 0  # prompts that another engine computed for this one, and whose pages came
    timed_out: int = 0  # ... those that waited in vain for some
    peers_lost: int = 0  # ... those whose source was lost
    failed: int = 0  # times that pages could not be sent to a peer
    pages_sent: int = 0
    bytes_sent: int = 0
    pages_received: int = 0
    bytes_received: int = 0
    seconds: float = 0.0  # from asking to the last page, summed
    refused: int = 0  # connections without the replicas' key
    dropped: int = 0  # frames that were malformed, forged, replayed or came too late
