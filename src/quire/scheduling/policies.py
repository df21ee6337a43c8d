"""Scheduling policies, side by side. Each is a few pure decisions; the queues belong to the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.scheduling.sequence import Sequence as Seq
from quire.types.config import SchedulerOptions
from quire.types.errors import ConfigError


class FCFS:
    """First come, first served; whoever came last gives way."""

    name = "fcfs"
    contiguous = False  # whether memory is reserved whole, up front, in one piece

    def __init__(self, options: SchedulerOptions):
        pass

    def rank(self, seq: Seq, now: float) -> tuple[float, int]:
        """Who is served rather than whom: lower first."""
        return seq.arrival, seq.order

    def order(self, waiting: Sequence[Seq], now: float) -> Iterable[Seq]:
        return waiting

    def victim(self, running: Sequence[Seq], now: float) -> Seq:
        return max(running, key=lambda s: self.rank(s, now))

    def admits(self, running: int) -> bool:
        return True

    def reserve(self, batch: Sequence[Seq]) -> int:
        """Tokens to set aside for each newly admitted sequence beyond what it needs now."""
        return 0


class Priority(FCFS):
    """Lower number first. Every `ageing` seconds of waiting are worth one level, so nobody starves."""

    name = "priority"

    def __init__(self, options: SchedulerOptions):
        self._ageing = options.ageing

    def rank(self, seq: Seq, now: float) -> tuple[float, int]:
        return seq.priority - (now - seq.arrival) / self._ageing, seq.order

    def order(self, waiting: Sequence[Seq], now: float) -> Iterable[Seq]:
        return sorted(waiting, key=lambda s: self.rank(s, now))


class Static(FCFS):
    """Classic static batching, the baseline: a batch starts when the last one has wholly ended, and every
    member gets contiguous memory for the longest prompt plus the longest answer among them."""

    name = "static"
    contiguous = True

    def admits(self, running: int) -> bool:
        return running == 0

    def reserve(self, batch: Sequence[Seq]) -> int:
        return max(s.prompt_len for s in batch) + max(s.limit - s.prompt_len for s in batch)


POLICIES = {policy.name: policy for policy in (FCFS, Priority, Static)}


def make_policy(options: SchedulerOptions) -> FCFS:
    try:
        return POLICIES[options.scheduler](options)
    except KeyError:
        known = ", ".join(POLICIES)
        raise ConfigError(f"unknown scheduler {options.scheduler!r}; known: {known}") from None
