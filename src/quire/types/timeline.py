"""What happened to one sequence, in few enough numbers to keep for many: where its time went, why its prefix hit.

Times are seconds on the engine's monotonic clock inside the engine and since the epoch outside (types.messages), 0
where the moment has not come.
"""

from __future__ import annotations

import enum

import msgspec

MAX_CHUNKS = 64  # prefill chunks told apart; later ones join the last
MAX_PREEMPTIONS = 16


class PrefixOutcome(enum.StrEnum):
    """Why a prompt's prefix was found only so far."""

    FULL = "full"  # all that could be shared was found
    NEW = "new"  # the next page was never computed here (or too long ago to remember)
    EVICTED = "evicted"  # it was, but made room for others
    SALT = "salt"  # its tokens were, but for another salt
    WINDOW = "window"  # it is there, but pages of a sliding window behind it are gone
    STATE = "state"  # it is there, but no snapshot of the recurrent layers' states behind it
    SHORT = "short"  # the prompt does not fill a page, and no cached one begins with it
    SCORED = "scored"  # prompt logprobs, a mean over the prompt, or accumulated attention need every position computed
    BUDGET = "budget"  # beyond what a request with a KV budget holds before it first evicts
    OFF = "off"  # the prefix cache is off


class Preemption(msgspec.Struct, array_like=True):
    at: float
    computed: int  # KV entries given up
    resumed: float = 0.0
    recomputed: int = 0  # of them, not found in the cache again


class Timeline(msgspec.Struct, kw_only=True):
    request: str
    branch: int
    prompt: int
    arrival: float
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    finish: str = ""
    outputs: int = 0
    expected: tuple[float, float] = (0.0, 0.0)  # output tokens that were likely, and that nine of ten stay below
    predicted_wait: float = 0.0  # seconds to the first token, as of when it was queued; 0: nothing was known
    forced: int = 0  # of outputs, forced by a grammar: they took no step
    drafted: int = 0  # draft tokens
    accepted: int = 0  # ... of them, right
    cached: int = 0
    blended: int = 0  # prompt tokens whose KV was copied from another place
    recomputed: int = 0  # ... of them, computed again because their place changes them
    blend_error: float | None = None  # deviation of the others, relative to the values of all; None: not looked at
    evicted: int = 0  # tokens whose KV was dropped to keep a budget
    pending: float = 0.0  # seconds spent waiting for pages that another request was computing or loading
    chunks: list[tuple[float, int]] = []  # (planned at, tokens) of steps that computed more than one token
    preemptions: list[Preemption] = []
    prefix: PrefixOutcome | None = None
    gone_at: float = 0.0  # when the first missing page made room, if it was evicted
    gone_for: str = ""  # ... for which request
    page_size: int = 0  # tokens a hit is a multiple of
    snapshot: int = -1  # tokens behind which recurrent layers went on from a snapshot; -1: there are no such layers
    paged: int = 0  # tokens that pages alone would have served
    tiers: dict[str, int] = {}  # tokens that came from each tier below the device
    moved: int = 0  # bytes loaded for it
    saved: float = 0.0  # estimated seconds of computing that this saved, loading subtracted
