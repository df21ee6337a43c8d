"""Pages that one step fills, handed over as its layers are written:

    step: layer ... layer ─(written)─► part of every page, taken ─► sender thread: signed and sent ─► peer
          layer ... layer ─(written)─► next part ...                while the layers behind are computed

Taken in step order, so that no later step can have changed what goes. Few bytes go whole when the step is launched: in
parts they would cost more than they hide. Refuses to know: how pages are read, signed and sent.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from quire.types.kv import KVLayout
from quire.types.transfer import Bytes, Key, TierDone, TierJob, Transfer

log = logging.getLogger(__name__)

MIN_LAYERWISE_BYTES = 1 << 20  # of a transfer's pages of one group
MAX_QUEUED_BYTES = 4 << 30  # that were taken and wait to be sent

Ended = Callable[[TierDone], None]
Taken = tuple[list[Bytes], Any]  # buffers, and the event (on a GPU) after which they hold what was read


class SenderThread:
    """Sends pages that were taken, in order, beside the steps; a peer that reads slowly is waited for here."""

    def __init__(self, send: Callable[[TierJob, Ended], None], failed: Callable[[TierJob, Ended], None]) -> None:
        """`send` may raise; `failed` hears of what is not sent."""
        self._send, self._failed = send, failed
        self._queue: queue.SimpleQueue[tuple[TierJob, Any, Ended] | None] = queue.SimpleQueue()
        self._queued = 0  # bytes
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, job: TierJob, taken: Any, ended: Ended) -> None:
        """`taken`: the event after which its buffers hold the pages, or None. Where too much waits it is not sent."""
        size = _size(job)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-page-sender", daemon=True)
                self._thread.start()
            fits = not self._queued or self._queued + size <= MAX_QUEUED_BYTES
            self._queued += size if fits else 0
        if fits:
            self._queue.put((job, taken, ended))
        else:
            log.warning("KV pages are not handed over: more than %d bytes wait to be sent", MAX_QUEUED_BYTES)
            self._failed(job, ended)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            job, taken, ended = one
            try:
                if taken is not None:
                    taken.synchronize()
                self._send(job, ended)
            except Exception:  # whatever it is, what waits for its end must hear of it
                log.exception("KV pages could not be handed over")
                self._failed(job, ended)
            with self._lock:
                self._queued -= _size(job)

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()


def _size(job: TierJob) -> int:
    return sum(buffer.nbytes for buffer in job.buffers)


class _Pages:
    """Pages of one group that are sent together, and what of them has gone."""

    def __init__(self, transfer: Transfer, places: list[int], layout: KVLayout):
        self.transfer = transfer
        self.places = places  # of them in the transfer
        self.keys: list[Key] = [transfer.keys[i] for i in places]
        self.pages = [transfer.pages[i] for i in places]
        self.nothing = TierDone(0, [False] * len(places), 0.0)
        parts = layout.layer_parts(self.keys[0][0])
        in_parts = len(parts) > 1 and len(places) * layout.page_bytes >= MIN_LAYERWISE_BYTES
        # (number of the part, layer that ends it, bytes of a page)
        self.left = [(i, float(part.layer), part.start, part.end) for i, part in enumerate(parts)]
        if not in_parts:
            self.left = [(-1, inf, 0, layout.page_bytes)]


class LayerwiseSend:
    """The layerwise transfers of one step. Its methods are called by the thread that runs the step."""

    def __init__(
        self,
        transfers: list[Transfer],
        layout: KVLayout,
        take: Callable[[list[int], int, int], Taken],
        send: Callable[[TierJob, Any, Ended], None],
        end: Callable[[Transfer, list[bool], float], None],
    ):
        """`take` reads bytes of device pages as they are now; `send` gives a job, but for its id, to the sender; `end`
        reports a transfer, from any thread."""
        self._take, self._send, self._end = take, send, end
        self._lock = threading.Lock()
        self._moved = {transfer.id: [True] * len(transfer.keys) for transfer in transfers}
        self._jobs = {transfer.id: 0 for transfer in transfers}  # that have not ended
        self._pages: list[_Pages] = []
        for transfer in transfers:
            for group in sorted({key[0] for key in transfer.keys}):
                places = [i for i, key in enumerate(transfer.keys) if key[0] == group]
                self._pages.append(_Pages(transfer, places, layout))
                self._jobs[transfer.id] += len(self._pages[-1].left)
        self.layers = frozenset(int(one[1]) for pages in self._pages for one in pages.left if one[1] != inf)

    def layer_written(self, layer: float) -> None:
        """K and V of all layers up to this are in their pages, or will be when the device gets there."""
        for pages in self._pages:
            while pages.left and pages.left[0][1] <= layer:
                part, _, start, stop = pages.left[0]
                buffers, taken = self._take(pages.pages, start, stop)  # may find no memory: then it is still left
                del pages.left[0]
                job = TierJob(0, "put", pages.keys, buffers, pages.transfer.handover, part)
                self._send(job, taken, partial(self._sent, pages))

    def launched(self) -> None:
        """The step is launched whole."""
        self.layer_written(inf)

    def abort(self) -> None:
        """The step failed: what has not gone will not."""
        for pages in self._pages:
            for _ in range(len(pages.left)):
                self._sent(pages, pages.nothing)
            pages.left.clear()

    def _sent(self, pages: _Pages, done: TierDone) -> None:
        transfer = pages.transfer
        with self._lock:
            moved = self._moved[transfer.id]
            for place, ok in zip(pages.places, done.done, strict=True):
                moved[place] = moved[place] and ok
            self._jobs[transfer.id] -= 1
            over = not self._jobs[transfer.id]
        if over:
            self._end(transfer, moved, done.seconds)
