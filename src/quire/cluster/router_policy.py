"""The seam of router policies: what a router knows of requests and replicas, and what it decides.

A router knows its own decisions at once, and what replicas tell of them as it comes. The same objects route in a
cluster and in the simulator. Refuses to know: links, clocks, which policies there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from math import inf
from random import Random
from typing import NamedTuple

from quire.cluster.prefix_directory import DEFAULT_CAPACITY, PrefixDirectory

# What one more request under way costs, in tokens of a prompt: while it draws its own (256 of them, say) it slows the
# others, and they slow it, by about what computing as many tokens takes.
REQUEST_TOKENS = 512
MAX_COMPARED = 32  # replicas whose loads are compared for one request: of more, others for each


class RouteView(NamedTuple):
    """A request as a router sees it."""

    tokens: int  # of its prompt
    blocks: Sequence[Hashable] = ()  # names of its prompt's blocks: equal names are equal prefixes
    tenant: str = ""
    session: str = ""
    id: Hashable = None  # by which a policy that observes requests hears of it again
    now: float = 0.0
    ttft: float = 0.0  # its targets, in seconds; 0: none
    tpot: float = 0.0


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
    observes = False  # whether it is to be told what becomes of requests
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

    def moved(self, request: RouteView, replica: int) -> None:  # noqa: B027
        """It goes on there, from its pages, whatever this policy would choose."""

    def offloaded(self, request: Hashable) -> None:  # noqa: B027
        """Another replica computes its prompt."""

    def first_token(self, request: Hashable, now: float) -> None:  # noqa: B027
        """Of its answer."""

    def ended(self, request: Hashable, now: float, tokens: int) -> None:  # noqa: B027
        """Its replica has nothing to do with it any more; `tokens`: that it drew there, none where that says nothing of
        how long it takes."""
