"""Messages between a client and an engine process: msgpack by msgspec, tagged, never pickle.

Client → engine: Submit, Abort, FinishAt, Query, Reset, Heartbeat (to a replica on another machine), Shutdown; and from
the one that started it, Attach and Detach of further clients.
Engine → client: Ready (once a connection, or Failed), Events (one frame a step), CacheEvents (of a replica, to its
router), Reply (to the Query of the same id), Failed (the engine died), Heartbeat (when there was nothing else to say
for a while).

A Query carries an id that its Reply repeats: replies are matched by it and may come in any order.

Times in messages are wall-clock seconds since the epoch (`time.time()`) or durations in seconds. No process's monotonic
clock leaves its process: on another host, or after a restart, it means nothing. An engine converts on receipt
(`received`) and before sending (`wall_clock`), and keeps its own monotonic clock inside.
"""

from __future__ import annotations

import itertools
import time

import msgspec
from msgspec.structs import replace

from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.events import EngineStats, TokenEvent
from quire.types.pooling import PoolingInfo
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import Timeline
from quire.types.view import EngineView

MAX_FRAME = 64 << 20
MAX_CLOCK_DRIFT_S = 0.01  # by which the wall clock may move against the monotonic one before times are read anew


class Submit(msgspec.Struct, tag=True):
    request: Request


class Abort(msgspec.Struct, tag=True):
    request: str


class FinishAt(msgspec.Struct, tag=True):
    """Text matched a stop string: branch ends with `tokens` output tokens."""

    request: str
    branch: int
    tokens: int


class GetStats(msgspec.Struct, tag=True):
    pass


class GetView(msgspec.Struct, tag=True):
    pass


class GetTimelines(msgspec.Struct, tag=True):
    request: str


class Power(msgspec.Struct, tag=True):
    """Free the device's memory, or take it again. `level` of sleep, as vLLM's: weights wait in host memory (1), or are
    given up (2)."""

    asleep: bool
    level: int = 1


class Cache(msgspec.Struct, tag=True):
    """An order to the KV cache."""

    order: CacheOrder


class LoadAdapter(msgspec.Struct, tag=True):
    """Load a LoRA adapter from a directory, by this name from now on."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True):
    name: str


Question = GetStats | GetView | GetTimelines | Power | Cache | LoadAdapter | UnloadAdapter
_ids = itertools.count(1)  # of this process: two clients that take turns on one link never share an id


class Query(msgspec.Struct, tag=True):
    question: Question
    id: int = msgspec.field(default_factory=lambda: next(_ids))


class Reset(msgspec.Struct, tag=True):
    """Drop all cached prefixes and start counters anew (benchmarks)."""


class Shutdown(msgspec.Struct, tag=True):
    restart: bool = False  # whoever hosts the process starts another in its place


class Attach(msgspec.Struct, tag=True):
    """Another client of the same engine listens there, for a connection of its own."""

    client: str
    address: str


class Detach(msgspec.Struct, tag=True):
    """That client is gone, and its requests with it."""

    client: str


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo
    pid: int = 0
    host: str = ""
    page_tokens: int = 0  # of the pages that its CacheEvents tell of; 0: it tells of none
    number: int = -1  # of the replica that it was started as; -1: any
    connector: str = ""  # where other replicas ask it for KV pages; empty: it hands none over
    process: str = ""  # the identity of its process, whichever of its connections this comes over


class Events(msgspec.Struct, tag=True):
    events: list[TokenEvent]


class CacheEvents(msgspec.Struct, tag=True):
    """Pages that entered and left a replica's prefix cache, by name; `cleared`: all that were there before left."""

    stored: list[bytes]
    removed: list[bytes]
    cleared: bool = False


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats


class View(msgspec.Struct, tag=True):
    view: EngineView


class Timelines(msgspec.Struct, tag=True):
    """Of the branches of one request, running or ended; none if it is not, or no longer, known."""

    timelines: list[Timeline]


class Powered(msgspec.Struct, tag=True):
    pass


class Cached(msgspec.Struct, tag=True):
    report: CacheReport
    data: bytes = b""


class AdapterInfo(msgspec.Struct, frozen=True):
    name: str
    path: str


class Adapted(msgspec.Struct, tag=True):
    """The adapters that are loaded now."""

    adapters: list[AdapterInfo]


class Refused(msgspec.Struct, tag=True):
    """Not done, and why; `error` is the class in types.errors."""

    error: str
    message: str


Answer = Stats | View | Timelines | Powered | Cached | Adapted | Refused


class Reply(msgspec.Struct, tag=True):
    """`id` is that of the Query."""

    id: int
    answer: Answer


class Heartbeat(msgspec.Struct, tag=True):
    """Sent by the loop that steps, so that it proves progress and not mere existence. To a replica: its client is still
    there."""


class Failed(msgspec.Struct, tag=True):
    kind: str  # class name within types.errors, or "" for an internal error
    message: str


class WeightsInfo(msgspec.Struct, kw_only=True):
    """The model's files, as their headers tell of them. Nothing or 0: they do not."""

    path: str = ""  # of a GGUF file, or a directory
    kind: str = ""  # gguf or safetensors
    bytes: int = 0
    architecture: str = ""
    parameters: int = 0
    context_length: int = 0
    quantisation: str = ""  # of most of the weights


class EngineInfo(msgspec.Struct):
    """What a client may need to know of the engine behind it."""

    model: str
    max_model_len: int  # tokens of prompt and answer
    vocab_size: int
    pages: int
    page_size: int
    max_batch_tokens: int
    depth: int
    device: str
    dtype: str
    reasons: list[str]
    slots: int = 0  # sequences that run at once; 0: not known
    stream_len: int = 0  # tokens of prompt and answer with a KV budget, where that is more
    priorities: bool = False  # whether the scheduler looks at requests' priorities
    kv_dtype: str = ""  # of its pages
    prefix_cache: bool = True
    sparse: bool = False  # whether requests may have `sparse_pages`
    weights: WeightsInfo = msgspec.field(default_factory=WeightsInfo)
    adapters: list[AdapterInfo] = []  # LoRA adapters loaded at start
    pooling: PoolingInfo = PoolingInfo()

    def room(self, params: SamplingParams) -> int:
        """Tokens that prompt and answer may come to."""
        return max(self.max_model_len, self.stream_len) if params.kv_budget is not None else self.max_model_len

    @property
    def most_pooled(self) -> int:
        """Tokens of an input that nothing is generated for: a decoder keeps one for an answer."""
        return self.max_model_len if self.pooling.encoder else self.max_model_len - 1


FromAttached = Submit | Abort | FinishAt | Query
ToEngine = FromAttached | Reset | Heartbeat | Attach | Detach | Shutdown
ToClient = Ready | Events | CacheEvents | Reply | Heartbeat | Failed


class _WallOffset:
    """From wall-clock times to this process's monotonic clock: the same for all, unless somebody sets the clock. Read
    anew for each, requests of one moment would come apart by microseconds, and out of order."""

    def __init__(self) -> None:
        self._offset = time.monotonic() - time.time()

    def __call__(self) -> float:
        latest = time.monotonic() - time.time()
        if abs(latest - self._offset) > MAX_CLOCK_DRIFT_S:
            self._offset = latest
        return self._offset


_wall_offset = _WallOffset()


def received(request: Request) -> Request:
    """A request off the wire, its times on this process's monotonic clock. One that does not say when it arrived does
    so now."""
    now, offset = time.monotonic(), _wall_offset()
    arrival = min(request.arrival + offset, now) if request.arrival else now
    return replace(request, arrival=arrival, deadline=request.deadline + offset if request.deadline else 0.0)


def wall_clock(timeline: Timeline) -> Timeline:
    """A timeline of this process for the wire."""
    offset = time.time() - time.monotonic()

    def at(moment: float) -> float:
        return moment + offset if moment else 0.0

    return replace(
        timeline,
        arrival=at(timeline.arrival),
        admitted=at(timeline.admitted),
        first_token=at(timeline.first_token),
        ended=at(timeline.ended),
        gone_at=at(timeline.gone_at),
        chunks=[(at(planned), tokens) for planned, tokens in timeline.chunks],
        preemptions=[replace(p, at=at(p.at), resumed=at(p.resumed)) for p in timeline.preemptions],
    )
