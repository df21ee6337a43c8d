"""A spare engine process: started ahead, with everything imported and no model, so that a load need not wait for that.

Refuses to know: models, who loads them.
"""

from __future__ import annotations

import threading

from quire.engine.link import ProcessLink


class SpareProcess:
    """At most one; may be used from several threads. `delay`: seconds after one was taken before the next is started,
    whose imports would slow down those who wait for the first."""

    def __init__(self, delay: float = 2.0) -> None:
        self._delay = delay
        self._link: ProcessLink | None = None
        self._lock = threading.Lock()
        self._wanted = False  # from the first `prepare` to `close`

    def prepare(self) -> None:
        """Start one, unless there is one; returns at once. From now on there is another after each that is taken."""
        with self._lock:
            self._wanted = True
            self._start()

    def _start(self) -> None:
        if self._wanted and (self._link is None or not self._link.running):
            if self._link is not None:
                self._link.close()
            self._link = ProcessLink(None)

    def _start_next(self) -> None:
        with self._lock:
            self._start()

    def take(self) -> ProcessLink | None:
        """The spare, for its taker to start; None if there is none."""
        with self._lock:
            link, self._link = self._link, None
            if self._wanted:
                timer = threading.Timer(self._delay, self._start_next)
                timer.daemon = True
                timer.start()
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
