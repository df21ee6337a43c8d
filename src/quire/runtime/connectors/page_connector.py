"""What all connectors share: which pages are asked for, of whom and by whom; what is taken for them, and until when.

    get ──► PageRequest ──► source's engine ──► put ──► Pages (signed) ──► verified ──► into the buffer
                                             └► drop ──► PagesUnavailable

Every page is signed for its key, so one that is damaged, forged, of another model or out of place is dropped and
counted, as is one that nobody waits for (any more): a page comes once. Refuses to know: how frames travel.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from quire.runtime.connectors.handover_frames import (
    Cancel,
    PageRequest,
    Pages,
    PagesUnavailable,
    Probe,
    Received,
    decode,
    encode,
)
from quire.runtime.connectors.page_fetch import PageFetch
from quire.runtime.connectors.send_window import PeerState, SendWindow
from quire.runtime.tiers.signed_page import PageSigner, SignedPage
from quire.types.handover import Handover, HandoverStats
from quire.types.memory_use import usable_cores
from quire.types.transfer import Bytes, Key, TierDone, TierJob, Wanted

log = logging.getLogger(__name__)

MAX_KEYS = 1 << 17  # of one hand-over
MAX_PENDING_HANDOVERS = 4096  # hand-overs that peers wait for
BATCH_BYTES = 8 << 20  # of pages in one message, or one page
MAX_TIMEOUT_S = 60.0  # that a peer may ask to be waited for
MAX_IDLE_SHARE = 0.5  # of that, in which it reads nothing and is waited for; others' pages wait as well
MAX_THREADS = 8


Buffer = bytes | memoryview


def signed_bytes(signed: SignedPage) -> int:
    return sum(map(len, signed))


def _signed_name(key: Key, part: int) -> Key:
    """What a part of a page is signed for: names of whole pages are shorter."""
    return key if part == -1 else (key[0], key[1] + bytes([part]))


class _Route:
    """The way back to a peer that waits for pages of a hand-over."""

    def __init__(self, route: Hashable, timeout: float, now: float):
        self.route = route
        self.timeout = timeout
        self.used = now

    def is_stale(self, now: float) -> bool:
        """Whether the peer gave up long ago, and that it did so was lost on the way."""
        return now - self.used > 2 * self.timeout


class PageConnector(ABC):
    """Implements types.transfer.KVConnector but for the way that frames take."""

    address = ""

    def __init__(self, signer: PageSigner, signal: threading.Event, clock: Callable[[], float] = time.monotonic):
        """`signal` is set when a job has ended."""
        self._signer = signer
        self._parts = [signer.layout.layer_parts(group) for group in range(len(signer.layout.groups))]
        self._signal = signal
        self._clock = clock
        self._lock = threading.RLock()
        self._window = SendWindow(self._lock)
        self._fetches: dict[str, PageFetch] = {}  # under way, by hand-over
        self._routes: dict[str, _Route] = {}  # to peers that wait for pages, by hand-over
        self._requests: deque[Wanted] = deque()
        self._done: list[TierDone] = []
        self._wake: Callable[[], None] = lambda: None
        self.stats = HandoverStats()
        threads = min(MAX_THREADS, usable_cores() // 2)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="quire-pages") if threads > 1 else None

    # ---- for the engine -------------------------------------------------------------------------------------

    def wake_by(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def take_requests(self) -> list[Wanted]:
        with self._lock:
            found, self._requests = list(self._requests), deque()
        return found

    def submit(self, job: TierJob) -> None:
        """Pages are put as peers read those before: that may wait."""
        assert job.handover is not None, "pages of peers are a hand-over's"
        if job.kind == "get":
            self._request_pages(job, job.handover)
            return
        done = [True] * len(job.keys)
        if job.kind == "put":
            done = self._send_pages(job, job.handover)
        elif (route := self._route(job.handover)) is not None:
            self._send(route, [encode(PagesUnavailable(job.handover.id, job.keys))])
        self._end(TierDone(job.id, done, 0.0))

    def poll(self) -> Sequence[TierDone]:
        now = self._clock()
        with self._lock:
            for fetch in [one for one in self._fetches.values() if now - one.heard > one.handover.timeout]:
                self.stats.timed_out += 1
                came, wanted = len(fetch.came), len(fetch.job.keys)
                log.warning(
                    "a hand-over timed out: %d of %d pages came, the last %.1f s ago; the rest is computed here",
                    came, wanted, now - fetch.heard,
                )  # fmt: skip
                self._close(fetch)
            done, self._done = self._done, []
        return done

    def cancel(self, job_id: int) -> None:
        with self._lock:
            for fetch in [one for one in self._fetches.values() if one.job.id == job_id]:
                self._close(fetch)

    def scan(self) -> list[Key]:
        return []

    def close(self) -> None:
        """What is under way ends with what has come."""
        self.stop_sending()
        with self._lock:
            for fetch in list(self._fetches.values()):
                self._close(fetch)

    def stop_sending(self) -> None:
        """Nobody gets pages any more; who waits to send some need not."""
        with self._lock:
            self._routes.clear()
            self._window.wake()

    def _end_threads(self) -> None:
        """Last of all: until then messages may come."""
        if self._threads is not None:
            self._threads.shutdown()

    def _request_pages(self, job: TierJob, handover: Handover) -> None:
        with self._lock:
            known = handover.id in self._fetches
            if known or len(job.keys) > MAX_KEYS:
                self._end(TierDone(job.id, [False] * len(job.keys), 0.0))
                return
            self._fetches[handover.id] = PageFetch(job, handover, self._parts, self._clock())
            self.stats.started += 1
        want = PageRequest(handover.id, job.keys, handover.waits, handover.timeout)
        self._send_to(handover.source, [encode(want)])

    def _route(self, handover: Handover) -> Hashable | None:
        """To who waits for its pages, if anybody does."""
        if (found := self._routes.get(handover.id)) is None:
            return None
        found.used = self._clock()
        return found.route

    def _send_pages(self, job: TierJob, handover: Handover) -> list[bool]:
        """Pages go out in messages of bounded size, in their order."""
        if (route := self._route(handover)) is None:
            return [False] * len(job.keys)
        count = max(1, self._batch_bytes // job.buffers[0].nbytes)
        for start in range(0, len(job.keys), count):
            keys = job.keys[start : start + count]
            named = list(zip(keys, job.buffers[start : start + count], strict=True))
            if not self._may_send(route, handover, sum(content.nbytes for _, content in named)):
                return self._give_up(job, start, route, OSError("the peer does not read them"))
            signed = self._each(lambda one: self._signer.sign(_signed_name(one[0], job.part), one[1]), named)
            try:
                packed = self._pack(handover.id, signed)
            except OSError as error:
                self._window.withdraw(route)  # nothing was sent that a peer could read
                return self._give_up(job, start, route, error)
            self._send(route, [encode(Pages(handover.id, keys, job.part)), *packed])
            with self._lock:
                last = job.part in (-1, len(self._parts[keys[0][0]]) - 1)
                self.stats.pages_sent += len(keys) * last
                self.stats.bytes_sent += sum(signed_bytes(one) for one in signed)
        return [True] * len(job.keys)

    def _give_up(self, job: TierJob, start: int, route: Hashable, error: OSError) -> list[bool]:
        """Pages from `start` on could not be sent: who waits for them computes them."""
        assert job.handover is not None
        self.stats.failed += 1
        level = logging.WARNING if self.stats.failed == 1 else logging.DEBUG
        log.log(level, "KV pages could not be handed over: %s; the replica that waits for them computes them", error)
        self._send(route, [encode(PagesUnavailable(job.handover.id, job.keys[start:]))])
        return [True] * start + [False] * (len(job.keys) - start)

    def _may_send(self, route: Hashable, handover: Handover, size: int) -> bool:
        """Once the peer has read what was sent before. False: it has left, wants them no more, or reads nothing for too
        long, and counts as gone."""
        with self._lock:
            known = self._routes.get(handover.id)
        timeout = known.timeout * MAX_IDLE_SHARE if known is not None else 0.0
        state = PeerState(
            is_wanted=lambda: handover.id in self._routes,
            active_peers=self._active_peers,
            probe=lambda: self._send(route, [encode(Probe())]),
        )
        if self._window.wait(route, size, timeout, state):
            return True
        if handover.id in self._routes:
            self._left(route)
        return False

    def _active_peers(self) -> set[Hashable]:
        """Peers that wait for pages, and have not given up long ago."""
        now = self._clock()
        return {one.route for one in self._routes.values() if not one.is_stale(now)}

    def _end(self, done: TierDone) -> None:
        with self._lock:
            self._done.append(done)
        self._signal.set()

    def _close(self, fetch: PageFetch, *, lost: bool = False) -> None:
        """No more is taken for it. `lost`: its source is, and hears nothing."""
        del self._fetches[fetch.handover.id]
        seconds = self._clock() - fetch.began
        self.stats.seconds += seconds
        self.stats.completed += len(fetch.came) == len(fetch.job.keys)
        self.stats.remote_prefills += fetch.handover.waits and bool(fetch.came)
        if not lost:
            self._send_to(fetch.handover.source, [encode(Cancel(fetch.handover.id))])
        self._end(TierDone(fetch.job.id, [key in fetch.came for key in fetch.job.keys], seconds))

    # ---- from the link, on any thread -----------------------------------------------------------------------

    def _receive(self, route: Hashable, frames: Sequence[bytes]) -> None:
        """A message of a peer; `route` leads back to it."""
        try:
            frame = decode(frames[0])
        except (msgspec.MsgspecError, ValueError, IndexError):
            self._drop("it is no message")
            return
        if isinstance(frame, PageRequest):
            self._on_page_request(route, frame)
        elif isinstance(frame, Cancel):
            with self._lock:
                if (known := self._routes.get(frame.handover)) is not None and known.route == route:
                    del self._routes[frame.handover]
                    self._window.wake()
        elif isinstance(frame, PagesUnavailable):
            self._on_unavailable(frame)
        elif isinstance(frame, Received):
            self._window.acknowledged(route)
        elif isinstance(frame, Probe):
            pass
        elif isinstance(route, str):  # whom pages were asked of; nobody else sends any
            if self._on_pages(frame, frames[1:]):
                self._acknowledge(route)
        else:
            self._drop("nobody waits for its pages")

    def _on_page_request(self, route: Hashable, want: PageRequest) -> None:
        with self._lock:
            now = self._clock()
            if len(self._routes) >= MAX_PENDING_HANDOVERS:
                self._routes = {id: one for id, one in self._routes.items() if not one.is_stale(now)}
            known = self._routes.get(want.handover)
            taken = known is not None and known.route != route
            if taken or len(want.keys) > MAX_KEYS or len(self._routes) >= MAX_PENDING_HANDOVERS:
                self._drop("it asks for too much")
                self._send(route, [encode(PagesUnavailable(want.handover, want.keys[:MAX_KEYS]))])
                return
            self._routes[want.handover] = _Route(route, min(want.timeout, MAX_TIMEOUT_S), now)
            self._requests.append(Wanted(want.handover, want.keys, want.waits, want.timeout))
        self._wake()

    def _acknowledge(self, source: str) -> None:
        self._send_to(source, [encode(Received())])

    def _on_pages(self, frame: Pages, parts: Sequence[bytes]) -> bool:
        """Whether they were read, or will not be; else that is acknowledged later."""
        try:
            signed = self._unpack(parts)
        except (ValueError, OSError, IndexError) as error:  # they are not there any more
            self._unreadable(frame, error)
            return True
        self._take_pages(frame, signed)
        return True

    def _unreadable(self, frame: Pages, error: Exception) -> None:
        """Pages that a peer told of did not come, and will not."""
        self._drop(f"its pages cannot be read: {error}")
        self._on_unavailable(PagesUnavailable(frame.handover, frame.keys))

    def _take_pages(self, frame: Pages, signed: Sequence[Buffer]) -> None:
        if len(frame.keys) != len(signed):
            self._drop("keys and pages differ in number")
            return
        with self._lock:  # so that nothing is written for a job that has ended
            fetch = self._fetches.get(frame.handover)
            places = [fetch.place(key, frame.part) if fetch is not None else None for key in frame.keys]
            found = list(zip(frame.keys, signed, places, strict=True))
            verified = self._each(lambda one: self._verify(frame.part, *one), found)
            for (key, data, place), whole in zip(found, verified, strict=True):
                if fetch is None or place is None or fetch.place(key, frame.part) is None:
                    self._drop("nobody waits for the page, or for that part of it")
                elif not whole:
                    self._drop("the page is not what it is said to be")
                else:
                    self._took(fetch, key, frame.part, len(data))

    def _verify(self, part: int, key: Key, data: Buffer, place: Bytes | None) -> bool:
        return place is not None and self._signer.verify(_signed_name(key, part), data, place)

    def _took(self, fetch: PageFetch, key: Key, part: int, size: int) -> None:
        self.stats.bytes_received += size
        self.stats.pages_received += fetch.took(key, part, self._clock())
        if fetch.ended:
            self._close(fetch)

    def _each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Signing, copying and verifying take most of a hand-over's time: side by side, where there are cores."""
        if self._threads is None or len(items) < 2:
            return [work(one) for one in items]
        return list(self._threads.map(work, items))

    def _on_unavailable(self, frame: PagesUnavailable) -> None:
        with self._lock:
            if (fetch := self._fetches.get(frame.handover)) is None:
                return
            fetch.give_up(frame.keys, self._clock())
            if fetch.ended:
                self._close(fetch)

    def _drop(self, why: str) -> None:
        self.stats.dropped += 1
        log.warning("a frame of a peer was dropped: %s", why)

    def _lost(self, source: str) -> None:
        """The peer there is gone: nothing more comes from it."""
        with self._lock:
            for fetch in [one for one in self._fetches.values() if one.handover.source == source]:
                self.stats.peers_lost += 1
                self._close(fetch, lost=True)

    def _left(self, route: Hashable) -> None:
        """Nobody is behind this route any more."""
        with self._lock:
            self._routes = {id: one for id, one in self._routes.items() if one.route != route}
            self._window.forget(route)

    # ---- the way that frames take ---------------------------------------------------------------------------

    @property
    def _batch_bytes(self) -> int:
        return BATCH_BYTES

    def _pack(self, handover: str, signed: list[SignedPage]) -> list[bytes]:
        """Signed pages as parts of a message; OSError where there is no room for them."""
        return [b"".join(one) for one in signed]

    def _unpack(self, parts: Sequence[bytes]) -> Sequence[Buffer]:
        """What is returned holds until the next message."""
        return parts

    @abstractmethod
    def _send_to(self, address: str, frames: list[bytes]) -> None:
        """To the peer at an address, which may not be there."""

    @abstractmethod
    def _send(self, route: Hashable, frames: list[bytes]) -> None:
        """Back along a route, whoever may have left."""
