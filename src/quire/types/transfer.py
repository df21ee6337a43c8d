"""Moving pages between tiers, as data: what a plan asks for, what came of it, and the seam behind which bytes move.

    device ──► host memory ──► local disk ──► remote        a page is named by its key (group, hash), wherever it is

A plan starts transfers; the result of a later step reports their end. Device pages a transfer reads are read
before the step writes anything; device pages it fills belong to it until it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.types.handover import Handover, HandoverStats

DEVICE, HOST, DISK, REMOTE = "device", "host", "disk", "remote"
PEER = "peer"  # another engine: what it gives, and is given, is a hand-over's

Key = tuple[int, bytes]  # (group, page hash)
Bytes = npt.NDArray[np.uint8]


class Transfer(msgspec.Struct):
    """Copy pages from one tier to another. `pages` are the device's, where it is one of the two. Without a target
    nothing moves: it is a look-up of which keys the source has."""

    id: int
    source: str
    target: str
    keys: list[Key]
    pages: list[int] = []
    handover: Handover | None = None  # from or to a peer
    layerwise: bool = False  # of pages that this very step fills: they go as its layers are written


class Drop(msgspec.Struct):
    """Delete pages of a tier. Of a peer: tell it that these will not be handed over."""

    tier: str
    keys: list[Key]
    handover: Handover | None = None


class TransferDone(msgspec.Struct):
    id: int
    moved: list[bool]  # by key
    seconds: float


class TierSpec(msgspec.Struct, frozen=True):
    """A tier below the device, as its store found it at start."""

    name: str
    pages: int  # most pages it may hold; 0: it evicts by itself
    keys: list[Key] = []  # what it holds already, least recently used first
    kept: bool = False  # outlives the engine, or is shared: pages go there as soon as they are computed


class TierJob(msgspec.Struct):
    """What a store is asked to do with some keys: put `buffers` (a page each), get into them, find, or drop."""

    id: int
    kind: str  # put, get, find or drop
    keys: list[Key]
    buffers: Any = None  # a sequence of Bytes, one a key
    handover: Handover | None = None
    part: int = -1  # of a put: which of `KVLayout.layer_parts` buffers are; -1: whole pages


class TierDone(msgspec.Struct):
    id: int
    done: list[bool]  # by key: stored, delivered, there, gone
    seconds: float


class KVTier(Protocol):
    """A store of pages. It moves and verifies bytes; which page is where, and which is evicted, `memory/` decides."""

    def submit(self, job: TierJob) -> None:
        """Queue a job; gets and finds overtake puts. Buffers are the store's until the job is done."""
        ...

    def poll(self) -> Sequence[TierDone]:
        """Jobs that ended since it was last asked. A failed one ends too, with nothing done."""
        ...

    def cancel(self, job_id: int) -> None:
        """Do not begin the job if it has not begun; it ends either way, and poll() returns it."""
        ...

    def scan(self) -> list[Key]:
        """What is there, least recently used first; after a restart."""
        ...

    def close(self) -> None:
        """Finish what is queued, then stop."""
        ...


class Wanted(msgspec.Struct):
    """What a peer asks this engine for."""

    handover: str
    keys: list[Key]
    waits: bool  # for what is still being computed
    timeout: float


class KVConnector(KVTier, Protocol):
    """Carries pages between engines, for which it is one more store: `get` asks the hand-over's source for pages and
    ends when all came, were said not to come, or nothing came for its timeout; `put`, from any thread, sends pages that
    a peer wants, whole or in parts by layers, and `drop` tells it that some will not come. Only verified pages ever
    reach a buffer, and none after its job has ended.
    """

    address: str  # that peers reach it by

    def take_requests(self) -> list[Wanted]:
        """What peers asked for since it was last called."""
        ...

    @property
    def has_requests(self) -> bool:
        """Whether there is any."""
        ...

    @property
    def stats(self) -> HandoverStats: ...

    def stop_sending(self) -> None:
        """No peer gets pages any more; a `put` that waits for one ends."""
        ...

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Call this, from any thread, when a peer asks for something."""
        ...
