"""The time, as everything that takes part in one step sees it."""

from __future__ import annotations


class Clock:
    """`now` is set once by whoever submits, plans, commits or expires, and read by everyone else: within a step it
    stands still, and a simulator can set it to any time."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0):
        self.now = now
