"""Messages between a client and an engine process: msgpack by msgspec, tagged, never pickle.

Client → engine: Submit, Abort, FinishAt, GetStats, GetView, GetTimelines, Power, Cache, Reset, Shutdown.
Engine → client: Ready (once, or Failed), Events (one frame a step), Stats, View, Timelines, Powered, Cached, Failed
(the engine died), Heartbeat (when there was nothing else to say for a while).
"""

from __future__ import annotations

import msgspec

from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.events import EngineStats, TokenEvent
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import Timeline
from quire.types.view import EngineView

MAX_FRAME = 64 << 20


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
    """Free the device's memory, or take it again; answered by Powered."""

    asleep: bool


class Cache(msgspec.Struct, tag=True):
    """An order to the KV cache; answered by Cached."""

    order: CacheOrder


class Reset(msgspec.Struct, tag=True):
    """Forget all cached prefixes and start counters anew (benchmarks)."""


class Shutdown(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class Events(msgspec.Struct, tag=True):
    events: list[TokenEvent]


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats


class View(msgspec.Struct, tag=True):
    view: EngineView


class Timelines(msgspec.Struct, tag=True):
    """Of the branches of one request, running or ended; none if it is not, or no longer, known."""

    request: str
    timelines: list[Timeline]


class Cached(msgspec.Struct, tag=True):
    report: CacheReport | None = None
    data: bytes = b""
    error: str = ""
    message: str = ""


class Powered(msgspec.Struct, tag=True):
    """`error`: the class in types.errors of a refusal, or nothing."""

    error: str = ""
    message: str = ""


class Heartbeat(msgspec.Struct, tag=True):
    """Sent by the loop that steps, so that it proves progress and not mere existence."""


class Failed(msgspec.Struct, tag=True):
    kind: str  # class name within types.errors, or "" for an internal error
    message: str


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

    def room(self, params: SamplingParams) -> int:
        """Tokens that prompt and answer may come to."""
        return max(self.max_model_len, self.stream_len) if params.kv_budget is not None else self.max_model_len


ToEngine = Submit | Abort | FinishAt | GetStats | GetView | GetTimelines | Power | Cache | Reset | Shutdown
ToClient = Ready | Events | Stats | View | Timelines | Powered | Cached | Heartbeat | Failed
