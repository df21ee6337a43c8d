"""What an engine does while nobody asks for anything, a little at a time: record the steps that its start left out,
have attention prepare for lengths of prompts, measure products, and record steps again that then take other kernels.

Refuses to know: when nobody asks.
"""

from __future__ import annotations

from quire.runtime.product_search import ProductSearch
from quire.runtime.worker import ForwardWorker


class IdleWork:
    def __init__(self, worker: ForwardWorker, search: ProductSearch | None = None):
        self._worker = worker
        self._search = search
        self._unprepared = True

    def prepare_again(self) -> None:
        """There are new steps to record."""
        self._unprepared = True

    def proceed(self, *, quiet: bool) -> bool:
        """Do a piece; whether there is more to do now. `quiet`: nobody has asked for a while, so that measuring, which
        nobody waits for, would be in nobody's way."""
        if self._unprepared:
            self._unprepared = self._worker.prepare_next()
            return self._unprepared or (quiet and self._search is not None)
        if self._search is None or not quiet:
            return False
        if not self._search.proceed():
            self._worker.record_again(self._search.changed)
            self._search, self._unprepared = None, True
        return True
