"""A spare engine process: started ahead, with everything imported and no model, so that neither a load nor a restart
need wait for that.

Refuses to know: models, who loads them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from quire.engine.link import ProcessLink
from quire.engine.weight_holder import WeightHolder
from quire.types.errors import EngineDeadError
from quire.types.memory_use import available_bytes

log = logging.getLogger(__name__)

LEAST_AVAILABLE_BYTES = 2 << 30  # eight times what a spare takes: where memory is scarcer there is none
MAX_DEFERRALS = 30  # times that a start is put off, because requests are being answered


class SpareProcess:
    """At most one; may be used from several threads. `delay`: seconds after one was taken before the next is started,
    whose imports would slow down those who wait for the first; and again while the server is `busy`. `holder`: of
    weights, for whatever it becomes the engine of."""

    def __init__(
        self, delay: float = 2.0, busy: Callable[[], bool] = lambda: False, holder: WeightHolder | None = None
    ) -> None:
        self._delay = delay
        self._holder = holder
        self.busy = busy
        self._link: ProcessLink | None = None
        self._lock = threading.Lock()
        self._wanted = False  # from the first `prepare` to `close`

    def prepare(self, *, later: bool = False) -> None:
        """Start one, unless there is one; returns at once. From now on there is another after each that is taken.
        `later`: after the delay, this one too."""
        with self._lock:
            self._wanted = True
            if later:
                self._defer(0)
            else:
                self._start()

    def _start(self) -> None:
        if not self._wanted or (self._link is not None and self._link.running):
            return
        if self._link is not None:
            self._link.close()
            self._link = None
        if (free := available_bytes()) < LEAST_AVAILABLE_BYTES:
            log.info("no spare engine process: %.1f GiB of memory are available", free / (1 << 30))
            return
        try:
            self._link = ProcessLink(None, holder=self._holder)
        except EngineDeadError as error:
            log.warning("no spare engine process: %s", error)

    def _defer(self, times: int) -> None:
        timer = threading.Timer(self._delay, self._start_next, [times])
        timer.daemon = True
        timer.start()

    def _start_next(self, deferred: int) -> None:
        with self._lock:
            if self._wanted and deferred < MAX_DEFERRALS and self.busy():
                self._defer(deferred + 1)
            else:
                self._start()

    def take(self) -> ProcessLink | None:
        """The spare, for its taker to start; None if there is none."""
        with self._lock:
            link, self._link = self._link, None
            if self._wanted:
                self._defer(0)
        if link is not None and not link.running:
            link.close()
            return None
        return link

    def close(self) -> None:
        """End it; there is no other until one is prepared again."""
        with self._lock:
            self._wanted = False
            link, self._link = self._link, None
        if link is not None:
            link.close(force=True)
