"""Ctrl-C in between: work that must not be torn apart is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _Deferral:
    """Passes interrupts on: at once or, while `held`, when released."""

    def __init__(self, handler: Handler):
        self.held = False
        self._handler = handler
        self._caught: list[tuple[int, FrameType | None]] = []

    def caught(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))
        if not self.held:
            self.release()

    def release(self) -> None:
        self.held = False
        if self._caught:
            self._handler(*self._caught.pop())


_deferral: _Deferral | None = None  # of the main thread, which alone has interrupts


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def deferrable() -> Iterator[None]:
    """Around many steps: in it `uninterrupted` makes no system calls, which take longer than a small step's plan."""
    global _deferral
    handler = signal.getsignal(signal.SIGINT)
    if _deferral is not None or not _on_main_thread() or not callable(handler):
        yield
        return
    _deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, _deferral.caught)
    try:
        yield
    finally:
        _deferral = None
        signal.signal(signal.SIGINT, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that comes inside is raised behind it."""
    with deferrable() if _deferral is None else nullcontext():
        deferral = _deferral if _on_main_thread() else None
        if deferral is None:
            yield
            return
        deferral.held = True
        try:
            yield
        finally:
            deferral.release()
