"""The requests of one server, running and lately ended: whose they are, when they came and went, what became of them.

Each leaves a line in the log when it ends. Refuses to know: HTTP, engines, what was said.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from quire.observe.metrics import Metrics, Reading, RequestMeter
from quire.types.request import Request

logger = logging.getLogger("quire.requests")

KEPT = 2048  # requests remembered
_PROMPT = re.compile(r"-\d{1,4}\Z")  # which prompt of several


@dataclass(eq=False)
class Entry:
    """One engine request. `arrived` is when its HTTP request came, `ready` when it was one for the engine, which counts
    from there; both in wall-clock seconds since the epoch, as the engine tells times."""

    request: str
    call: str  # id of the HTTP or gRPC request it belongs to
    owner: str  # name of the key
    traceparent: str
    prompt: int
    branches: int
    arrived: float
    ready: float
    meter: RequestMeter | Reading  # a reading, where another process of this server follows it
    model: str
    ended: float = 0.0  # 0 while it runs
    error: str = ""

    def seconds(self) -> float:
        return (self.ended or time.time()) - self.arrived


class EntryReport(msgspec.Struct):
    """An entry as one process of a server tells another of it."""

    request: str
    call: str
    owner: str
    traceparent: str
    prompt: int
    branches: int
    arrived: float
    ready: float
    meter: Reading
    model: str
    ended: float
    error: str

    @classmethod
    def of(cls, entry: Entry) -> EntryReport:
        meter = entry.meter.reading() if isinstance(entry.meter, RequestMeter) else entry.meter
        return msgspec.convert(vars(entry) | {"meter": meter}, cls)


class Ledger:
    """`reports`: whether another process is told of what changes here."""

    def __init__(self, on_end: Callable[[Entry], None] | None = None, *, reports: bool = False):
        self.on_end = on_end
        self._changed: dict[str, Entry] | None = {} if reports else None
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def find(self, id: str) -> list[Entry]:
        """By the id of an answer (all prompts of it), of an engine request, or of the call it came with."""
        if id in self._entries:
            return [self._entries[id]]
        return [e for e in self._entries.values() if e.call == id or _PROMPT.sub("", e.request) == id]

    def latest(self) -> Iterator[Entry]:
        """All that are remembered, the latest first."""
        by_arrival = sorted(self._entries.values(), key=lambda entry: entry.arrived)
        return reversed(by_arrival)

    def changes(self, *, running: bool) -> list[EntryReport]:
        """Those that came or ended since the last look, and with `running` how far all are that run."""
        assert self._changed is not None
        found, self._changed = self._changed, {}
        if running:
            found |= {id: entry for id, entry in self._entries.items() if not entry.ended}
        return [EntryReport.of(entry) for entry in found.values()]

    def note(self, report: EntryReport) -> None:
        """What another process follows."""
        self._put(Entry(**{name: getattr(report, name) for name in report.__struct_fields__}))

    def lose(self, requests: Iterable[str], error: str) -> None:
        """The process that followed them is gone."""
        for request in requests:
            if (entry := self._entries.get(request)) is not None and not entry.ended:
                entry.ended, entry.error = time.time(), error

    def _put(self, entry: Entry) -> None:
        self._entries[entry.request] = entry
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)

    @contextmanager
    def watch(
        self,
        request: Request,
        arrived: float,
        metrics: Metrics,
        *,
        call: str = "",
        owner: str = "",
        traceparent: str = "",
    ) -> Iterator[RequestMeter]:
        """Follow one engine request from here to its end, in the metrics of its model; `arrived` is a `perf_counter`
        time."""
        branches, came = request.params.n, time.time() - (time.perf_counter() - arrived)
        meter = metrics.request(len(request.prompt), arrived, request.params.max_tokens)
        ready = max(came, request.arrival)
        entry = Entry(
            request.id, call, owner, traceparent, len(request.prompt), branches, came, ready, meter, metrics.model
        )
        self._put(entry)
        if self._changed is not None:
            self._changed[request.id] = entry
        try:
            yield meter
        except BaseException as error:
            entry.error = getattr(error, "code", None) or type(error).__name__
            raise
        finally:
            meter.close(branches)
            entry.ended = time.time()
            if self._changed is not None:
                self._changed[request.id] = entry
            self._log(entry, meter)
            if self.on_end is not None:
                self.on_end(entry)

    def _log(self, entry: Entry, meter: RequestMeter) -> None:
        fields = {
            "request": entry.request,
            "request_id": entry.call,
            "key": entry.owner,
            "model": entry.model,
            "prompt_tokens": entry.prompt,
            "cached_tokens": meter.cached,
            "output_tokens": meter.tokens,
            "seconds": round(entry.seconds(), 4),
            "ttft": round(meter.first - meter.started, 4) if meter.first else None,
            "finish": ",".join(meter.reasons),
            "error": entry.error,
        }
        # Leaving a stream early is how a stopped or hung-up client looks from inside.
        outcome = "cancelled" if entry.error in ("GeneratorExit", "CancelledError") else "ended"
        logger.info("request %s", outcome, extra={"fields": {k: v for k, v in fields.items() if v not in (None, "")}})
