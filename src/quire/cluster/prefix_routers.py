"""Routers that know which replica holds which prefix, by a directory of them.

Refuses to know: links, clocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from quire.cluster.load_routers import PowerOfTwo
from quire.cluster.prefix_directory import DEFAULT_CAPACITY, PrefixDirectory
from quire.cluster.router_policy import ReplicaLoad, RouteView

MIN_MATCH = 0.25  # share of a prompt's blocks that must be known for its replica to be preferred
MAX_IMBALANCE = 1.5  # times the lightest load, and
SPARE_REQUESTS = 4  # so many requests more, that a replica may have and still be preferred for its prefix
# What computing a token costs, in tokens of queue: it delays this request, and those that come after it.
PREFILL_WEIGHT = 3
HEAT_WINDOW = 1024  # decisions over which a prefix's share of all requests is counted


class PrefixAware(PowerOfTwo):
    """The least loaded of the replicas that hold the longest prefix of the prompt, unless that has too much to do; else
    the less loaded of two."""

    def __init__(self, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY):
        super().__init__(replicas, seed)
        self.directory: PrefixDirectory = PrefixDirectory(replicas, capacity)

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        blocks = request.blocks
        found = self.directory.match(blocks)
        matched, chosen = 0, -1
        if found and found[0].blocks >= MIN_MATCH * len(blocks):
            chosen = min(members(found[0].replicas), key=lambda i: loads[i].cost)
            matched = found[0].blocks
        if chosen < 0 or self._overloaded(chosen, loads):
            matched, chosen = 0, super().choose(request, loads)
        self._note(chosen, request, matched)
        return chosen

    def _note(self, chosen: int, request: RouteView, matched: int) -> None:
        """The replica will have the rest of the prompt too."""
        self.saved = request.tokens * matched // len(request.blocks) if matched else 0
        self.directory.use(chosen, request.blocks)

    def _overloaded(self, chosen: int, loads: Sequence[ReplicaLoad]) -> bool:
        least = loads[self.least(loads)].requests
        return not loads[chosen].accepts_requests or loads[chosen].requests > MAX_IMBALANCE * least + SPARE_REQUESTS


class CacheAware(PrefixAware):
    """The least cost: what of the prompt must be computed there, behind what is queued there and beside what is under
    way. So a prefix is chased as far as that saves more than waiting for it takes; then it is computed on a second
    replica. A hot one is to be on as many replicas as its share of all requests is worth: until then its savings count
    for less, for who computes it on another replica does so for many."""

    def __init__(self, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY):
        super().__init__(replicas, seed, capacity)
        self._heat: dict[Hashable, int] = {}  # requests by the prefix they found, of the latest
        self._heat_before: dict[Hashable, int] = {}  # ... and of as many before those
        self._decisions = 0

    def _share(self, prefix: Hashable) -> float:
        """Of the latest requests, how many found this prefix; this one is counted."""
        heat = self._heat[prefix] = self._heat.get(prefix, 0) + 1
        latest = (self._decisions - 1) % HEAT_WINDOW + 1
        return (heat + self._heat_before.get(prefix, 0)) / min(self._decisions, HEAT_WINDOW + latest)

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        blocks = request.blocks
        if self._decisions % HEAT_WINDOW == 0:
            self._heat_before, self._heat = self._heat, {}
        self._decisions += 1
        chosen, matched = self.least(loads), 0
        best = loads[chosen].cost
        if blocks and (matches := self.directory.match(blocks)):
            longest = matches[0]
            wanted = self._share(blocks[longest.blocks - 1]) * self.replicas
            each = PREFILL_WEIGHT * request.tokens / len(blocks)
            if longest.replicas.bit_count() < wanted:
                each /= wanted
            for found in matches:
                saved = found.blocks * each
                if found.replicas >> chosen & 1 and not matched:  # the least loaded of all holds it
                    matched, best = found.blocks, best - saved
                    break
                for replica in members(found.replicas):
                    if (cost := loads[replica].cost - saved) < best:
                        chosen, matched, best = replica, found.blocks, cost
        self._note(chosen, request, matched)
        return chosen


def members(replicas: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while replicas:
        low = replicas & -replicas
        yield low.bit_length() - 1
        replicas ^= low
