"""An interrupt waits until a step is done, and loses nothing of it."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from quire.engine.interrupts import deferrable, uninterrupted
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


def test_around_many_steps_an_interrupt_still_waits_for_the_one_it_meets() -> None:
    before, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), deferrable():
        with uninterrupted():
            done.append("first")
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("met")
        done.append("after")
    assert done == ["first", "met"]
    assert signal.getsignal(signal.SIGINT) is before
    with uninterrupted():  # which nothing is left over in
        done.append("later")


def test_between_two_of_many_steps_an_interrupt_is_raised_at_once() -> None:
    before, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), deferrable():
        with deferrable(), uninterrupted():
            done.append("first")
        signal.raise_signal(signal.SIGINT)
        done.append("after")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is before
