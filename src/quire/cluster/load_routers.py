"""Routers that look at no prefixes: in turn, by load, by session.

Refuses to know: links, clocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

from quire.cluster.prefix_directory import DEFAULT_CAPACITY
from quire.cluster.router_policy import ReplicaLoad, RouterPolicy, RouteView

RING_POINTS = 64  # of each replica on the ring of session affinity


class RoundRobin(RouterPolicy):
    uses_loads = False

    def __init__(self, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY):
        super().__init__(replicas, seed)
        self._next = 0

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        for _ in range(self.replicas):
            chosen, self._next = self._next, (self._next + 1) % self.replicas
            if loads[chosen].accepts_requests:
                break
        return chosen


class LeastLoad(RouterPolicy):
    """The least cost of what is queued and under way."""

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        return self.least(loads)


class PowerOfTwo(RouterPolicy):
    """The less loaded of two picked at random: nearly as good as asking all, and no herd runs to one."""

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        one, two = self._ready(loads), self._ready(loads)
        return one if loads[one].cost <= loads[two].cost else two

    def _ready(self, loads: Sequence[ReplicaLoad]) -> int:
        """One at random; looks for it where many are not ready."""
        for _ in range(8):
            if loads[chosen := int(self.rng.random() * self.replicas)].accepts_requests:
                return chosen
        return self.rng.choice([i for i, load in enumerate(loads) if load.accepts_requests] or range(self.replicas))


class SessionAffinity(RouterPolicy):
    """A session, or else a tenant, goes to one replica as long as that is there: consistent hashing. Others are spread
    by load."""

    def __init__(self, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY):
        super().__init__(replicas, seed)
        points = [(_point(f"{seed}/{i}/{k}"), i) for i in range(replicas) for k in range(RING_POINTS)]
        self._ring = sorted(points)
        self._spread = LeastLoad(replicas, seed)

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        who = request.session or request.tenant
        if not who:
            return self._spread.choose(request, loads)
        start = bisect_left(self._ring, (_point(who), 0))
        for step in range(len(self._ring)):
            _, replica = self._ring[(start + step) % len(self._ring)]
            if loads[replica].accepts_requests:
                break
        return replica


def _point(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
