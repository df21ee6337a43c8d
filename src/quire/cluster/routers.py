"""Router policies: which replica a request goes to, from what the router knows of them.

A router knows its own decisions at once, and replicas' loads as of their last report. The same objects route in a
cluster and in the simulator. Refuses to know: links, clocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from random import Random
from typing import NamedTuple

from quire.types.errors import ConfigError

MAX_PREFIXES = 1 << 18  # blocks whose replica is remembered, least recently used forgotten first
MIN_MATCH = 0.25  # share of a prompt's blocks that must be known for its replica to be preferred
MAX_IMBALANCE = 1.5  # times the lightest load, and
SPARE_REQUESTS = 4  # so many requests more, that a replica may have and still be preferred for its prefix


class RouteView(NamedTuple):
    """A request as a router sees it."""

    tokens: int  # of its prompt
    blocks: Sequence[Hashable] = ()  # names of its prompt's blocks: equal names are equal prefixes
    tenant: str = ""


class ReplicaLoad:
    """What a router knows of one replica."""

    __slots__ = ("requests", "tokens")

    def __init__(self, requests: int = 0, tokens: int = 0):
        self.requests = requests  # under way or waiting
        self.tokens = tokens  # of prompts that are not computed yet

    def add(self, request: RouteView) -> None:
        """It was sent this one since the last report."""
        self.requests += 1
        self.tokens += request.tokens


class RouterPolicy(ABC):
    uses_loads = True  # whether decisions depend on what replicas report

    def __init__(self, replicas: int, seed: int = 0):
        self.replicas = replicas
        self.rng = Random(seed)

    @abstractmethod
    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        """The replica that this request goes to."""


class RoundRobin(RouterPolicy):
    uses_loads = False

    def __init__(self, replicas: int, seed: int = 0):
        super().__init__(replicas, seed)
        self._next = 0

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        chosen, self._next = self._next, (self._next + 1) % self.replicas
        return chosen


class LeastLoad(RouterPolicy):
    """Fewest tokens still to be computed of prompts, then fewest requests."""

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        return min(range(self.replicas), key=lambda i: (loads[i].tokens, loads[i].requests, i))


class PowerOfTwo(RouterPolicy):
    """The less loaded of two picked at random: nearly as good as asking all, and no herd runs to one."""

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        if self.replicas == 1:
            return 0
        one, two = self.rng.sample(range(self.replicas), 2)
        return min(one, two, key=lambda i: (loads[i].tokens, loads[i].requests, i))


class PrefixAware(PowerOfTwo):
    """The replica that computed the longest prefix of the prompt, unless it has too much to do; else the less loaded of
    two."""

    def __init__(self, replicas: int, seed: int = 0):
        super().__init__(replicas, seed)
        self._where: OrderedDict[Hashable, int] = OrderedDict()

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        matched, chosen = 0, -1
        for block in request.blocks:
            if (found := self._where.get(block)) is None:
                break
            matched, chosen = matched + 1, found
        if chosen < 0 or matched < MIN_MATCH * len(request.blocks) or self._overloaded(chosen, loads):
            chosen = super().choose(request, loads)
        for block in request.blocks:
            self._where[block] = chosen
            self._where.move_to_end(block)
        while len(self._where) > MAX_PREFIXES:
            self._where.popitem(last=False)
        return chosen

    def _overloaded(self, chosen: int, loads: Sequence[ReplicaLoad]) -> bool:
        least = min(load.requests for load in loads)
        return loads[chosen].requests > MAX_IMBALANCE * least + SPARE_REQUESTS


ROUTERS: dict[str, type[RouterPolicy]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "prefix": PrefixAware,
}


def make_router(name: str, replicas: int, seed: int = 0) -> RouterPolicy:
    if name not in ROUTERS:
        raise ConfigError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name](replicas, seed)
