"""How far a batch of requests is: one line on standard error, written by whoever drives them, so that no thread of its
own takes time from the engine."""

from __future__ import annotations

import sys
import time

INTERVAL_S = 0.5  # between one line and the next; nothing that is over sooner shows any


class RequestProgress:
    """Call `tokens` and `ended` as they come. `total` may not be known. `on`: None is where standard error is a
    terminal. `what` is counted, where it is not requests."""

    def __init__(self, total: int | None, *, on: bool | None = None, what: str = "requests"):
        self._on = sys.stderr.isatty() if on is None else on
        self._total, self._what = total, what
        self._done = self._tokens = 0
        self._began = self._shown = time.monotonic()
        self._any = False

    def tokens(self, count: int) -> None:
        self._tokens += count
        self._refresh()

    def ended(self, count: int = 1) -> None:
        self._done += count
        self._refresh()

    def _refresh(self) -> None:
        if not self._on or (now := time.monotonic()) - self._shown <= INTERVAL_S:
            return
        self._shown, spent = now, now - self._began
        line = (f"{self._done}/{self._total} " if self._total else f"{self._done} ") + self._what
        if self._tokens:
            line += f", {self._tokens / spent:,.0f} output tok/s"
        if self._done and self._total:
            line += f", about {spent / self._done * (self._total - self._done):.0f} s left"
        sys.stderr.write(f"\r{line:<72}")
        sys.stderr.flush()
        self._any = True

    def __enter__(self) -> RequestProgress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._any:
            sys.stderr.write(f"\r{'':<72}\r")
            sys.stderr.flush()
