"""Simulated replicas that come and go as a cluster's autoscaler says.

    starting (for `startup` seconds) ──► ready ──► draining (until it has nothing to do) ──► stopped, its cache lost

Refuses to know: what replicas do, routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from quire.cluster.autoscaler import INTERVAL_S, Autoscaler, FleetMeter
from quire.types.autoscaling import AutoscaleOptions
from quire.types.events import EngineStats


class FleetScaling:
    def __init__(self, options: AutoscaleOptions, replicas: int, startup: float):
        """`startup`: seconds from the decision for a replica until it takes requests."""
        self.autoscaler = Autoscaler(options, replicas)
        self.next = INTERVAL_S  # when it looks at the load
        self.seconds = 0.0  # that replicas were there, starting and draining included
        self.peak = replicas
        self.busy = False  # whether replicas had something to do when it last looked
        self._startup = startup
        self._meter = FleetMeter()
        self._counters: dict[int, EngineStats] = {}  # of replicas that ended too: they go on where those come back
        self._due = dict.fromkeys(range(replicas), -inf)  # replicas that are to be there, and from when on
        self._draining: set[int] = set()

    @property
    def present(self) -> list[int]:
        """Replicas that have something to say."""
        return [*self._due, *self._draining]

    def ready(self, number: int, now: float) -> bool:
        return self._due.get(number, inf) <= now

    def look(self, now: float, found: Mapping[int, EngineStats], parked: int) -> list[int]:
        """`found`: of all that are present. Returns those that ended."""
        self.seconds += len(self.present) * (now - self.next + INTERVAL_S)
        self.next = now + INTERVAL_S
        self.busy = any(one.running or one.waiting for one in found.values())
        ended = [one for one in self._draining if not (found[one].running or found[one].waiting)]
        self._draining.difference_update(ended)
        ready = sum(due <= now for due in self._due.values())
        self._counters.update(found)
        target = self.autoscaler.decide(now, self._meter.sample(dict(self._counters), ready, parked))
        while len(self._due) < target:
            if self._draining:
                self._due[self._draining.pop()] = now
            else:
                free = next(one for one in range(self.autoscaler.max_replicas) if one not in self._due)
                self._due[free] = now + self._startup
        surplus = sorted(self._due, key=lambda one: (self._due[one] <= now, _burden(found.get(one)), -one))
        for one in surplus[: len(self._due) - target]:
            if self._due.pop(one) <= now:
                self._draining.add(one)
        self.peak = max(self.peak, target)
        return ended


def _burden(stats: EngineStats | None) -> int:
    return 0 if stats is None else stats.running + stats.waiting
