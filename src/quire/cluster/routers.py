"""Router policies: which replica a request goes to, from what the router knows of them.

A router knows its own decisions at once, and replicas' loads as of their last report. Those that look at prefixes have
a directory of them. The same objects route in a cluster and in the simulator. Refuses to know: links, clocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from hashlib import blake2b
from math import inf
from random import Random
from typing import NamedTuple

from quire.cluster.prefix_directory import DEFAULT_CAPACITY, PrefixDirectory
from quire.types.errors import ConfigError

MIN_MATCH = 0.25  # share of a prompt's blocks that must be known for its replica to be preferred
MAX_IMBALANCE = 1.5  # times the lightest load, and
SPARE_REQUESTS = 4  # so many requests more, that a replica may have and still be preferred for its prefix
# What one more request under way costs, in tokens of a prompt: while it draws its own (256 of them, say) it slows the
# others, and they slow it, by about what computing as many tokens takes.
REQUEST_TOKENS = 512
# What computing a token costs, in tokens of queue: it delays this request, and those that come after it.
PREFILL_WEIGHT = 3
MAX_COMPARED = 64  # replicas whose loads are compared for one request: of more, others for each
HEAT_WINDOW = 1024  # decisions over which a prefix's share of all requests is counted
RING_POINTS = 64  # of each replica on the ring of session affinity


class RouteView(NamedTuple):
    """A request as a router sees it."""

    tokens: int  # of its prompt
    blocks: Sequence[Hashable] = ()  # names of its prompt's blocks: equal names are equal prefixes
    tenant: str = ""
    session: str = ""


class ReplicaLoad:
    """What a router knows of one replica. `cost`: its queue and what it has under way, in tokens to be computed;
    without bound while it takes no requests."""

    __slots__ = ("_accepts_requests", "cost", "requests", "tokens")

    def __init__(self, requests: int = 0, tokens: int = 0, *, accepts_requests: bool = True):
        self.requests = requests  # under way or waiting
        self.tokens = tokens  # of prompts that are not computed yet
        self.accepts_requests = accepts_requests

    @property
    def accepts_requests(self) -> bool:
        """Whether it takes requests."""
        return self._accepts_requests

    @accepts_requests.setter
    def accepts_requests(self, accepts_requests: bool) -> None:
        self._accepts_requests = accepts_requests
        self._weigh()

    def _weigh(self) -> None:
        self.cost = self.tokens + REQUEST_TOKENS * self.requests if self._accepts_requests else inf

    def sent(self, tokens: int) -> None:
        """It was sent one more, with so many tokens to compute."""
        self.requests += 1
        self.tokens += tokens
        self._weigh()

    def prefilled(self, tokens: int) -> None:
        """It has computed the tokens of a prompt."""
        self.tokens -= tokens
        self._weigh()

    def ended(self, tokens: int) -> None:
        """A request is over; `tokens`: of its prompt, if that was not computed."""
        self.requests -= 1
        self.tokens -= tokens
        self._weigh()


class RouterPolicy(ABC):
    uses_loads = True  # whether decisions depend on what replicas report
    directory: PrefixDirectory | None = None  # of those that look at prefixes
    saved = 0  # tokens of the prompt routed last that its replica is known to hold

    def __init__(self, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY):
        """`capacity`: blocks that a replica can hold."""
        self.replicas = replicas
        self.rng = Random(seed)
        self._after = 0

    def least(self, loads: Sequence[ReplicaLoad]) -> int:
        """Where the cost is least, of the next `MAX_COMPARED` in turn."""
        first, count = self._after, self.replicas
        turn = [load.cost for load in loads[first : first + MAX_COMPARED]]
        turn += [load.cost for load in loads[: min(count, MAX_COMPARED) - len(turn)]]
        if (least := min(turn)) == inf:
            turn = [load.cost for load in (*loads[first:], *loads[:first])]
            least = min(turn)
        chosen = (first + turn.index(least)) % count
        self._after = (chosen + 1) % count
        return chosen

    @abstractmethod
    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        """The replica that this request goes to: one that is ready, if any is."""


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


def members(replicas: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while replicas:
        low = replicas & -replicas
        yield low.bit_length() - 1
        replicas ^= low


ROUTERS: dict[str, type[RouterPolicy]] = {
    "cache-aware": CacheAware,
    "prefix": PrefixAware,
    "session": SessionAffinity,
    "power-of-two": PowerOfTwo,
    "least-load": LeastLoad,
    "round-robin": RoundRobin,
}


def make_router(name: str, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY) -> RouterPolicy:
    if name not in ROUTERS:
        raise ConfigError(f"router must be one of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name](replicas, seed, capacity)
