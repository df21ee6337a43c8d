"""A spare engine process: started ahead, with everything imported and no model, so that a load need not wait for that.

Refuses to know: models, who loads them.
"""

from __future__ import annotations

import threading

from quire.engine.link import ProcessLink


class SpareProcess:
    """At most one; may be used from several threads."""

    def __init__(self) -> None:
        self._link: ProcessLink | None = None
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self) -> None:
        """Start one, unless there is one; returns at once."""
        with self._lock:
            if self._closed or (self._link is not None and self._link.running):
                return
            if self._link is not None:
                self._link.close()
            self._link = ProcessLink(None)

    def take(self) -> ProcessLink | None:
        """The spare, for its taker to start; None if there is none."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None and not link.running:
            link.close()
            return None
        return link

    def close(self) -> None:
        """End it; there will be no other."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close(force=True)
