"""An interrupt waits until a step is done, and loses nothing of it."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from quire.engine.interrupts import uninterrupted
from quire.engine.link import LocalLink
from quire.types.messages import Events


def test_a_step_is_finished_first_and_its_events_are_kept() -> None:
    done: list[str] = []

    def step() -> list[str]:
        signal.raise_signal(signal.SIGINT)
        done.append("step")
        core.busy = False
        return ["event"]

    core = SimpleNamespace(busy=True, step=step, settle=lambda: done.append("settled"))
    link = LocalLink(core, None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        link.receive(None)
    assert done == ["step", "settled"]
    assert link.receive(None) == [Events(["event"])]  # type: ignore[list-item]


def test_nothing_changes_elsewhere() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    seen: list[object] = []

    def inside() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_handler_that_installs_another_leaves_the_next_step_whole() -> None:
    """As programs do that end at the second Ctrl-C."""
    before, done = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("step")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["step"]
