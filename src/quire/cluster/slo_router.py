"""Routing by service levels: where a request misses its targets, and makes others miss theirs, least.

    replica ──► prompts on the way there, each with its work and its deadline ──► who would be late with one more?

Replicas are taken to serve prompts that can be in time before those that cannot, the shortest first, as the scheduler
`auto` does. How long that takes is learned from requests that ended. Refuses to know: links, clocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from quire.cluster.latency_model import LatencyLine, prefill_work
from quire.cluster.prefix_directory import DEFAULT_CAPACITY
from quire.cluster.prefix_routers import PREFILL_WEIGHT, CacheAware, members
from quire.cluster.router_policy import MAX_COMPARED, ReplicaLoad, RouteView

MARGIN = 0.95  # of a target that a prediction must be within: some take longer
MEAN_WEIGHT = 0.01  # of the latest prompt in their mean length


@dataclass(slots=True)
class Routed:
    """A request under way, on its replica."""

    replica: int
    sent: float
    work: float  # of its prompt, on that replica
    deadline: float  # of its first token
    tpot: float
    late: bool  # when it was sent, it was expected to be
    alone: bool  # no other prompt was to be computed there
    first_token: float = 0.0


class SloAware(CacheAware):
    """The least cost, as `cache-aware` weighs it, with the targets that are missed because of the decision: each counts
    as much as computing a prompt of mean length. As `cache-aware` while nothing is known of how long things take, and
    for requests without targets."""

    observes = True

    def __init__(self, replicas: int, seed: int = 0, capacity: int = DEFAULT_CAPACITY):
        super().__init__(replicas, seed, capacity)
        self.ttft = LatencyLine()  # by prompt work
        self.tpot = LatencyLine()  # by requests under way
        self._mean_prompt = 0.0  # tokens
        self._requests: dict[Hashable, Routed] = {}
        self._under_way = [0] * replicas
        self._prompts: list[dict[Hashable, Routed]] = [{} for _ in range(replicas)]  # not computed yet, by replica
        self._answers: list[dict[Hashable, Routed]] = [{} for _ in range(replicas)]  # with a target for each token

    def choose(self, request: RouteView, loads: Sequence[ReplicaLoad]) -> int:
        known = self._mean_prompt or request.tokens
        self._mean_prompt = known + MEAN_WEIGHT * (request.tokens - known)
        if not self.ttft.known or not (request.ttft or request.tpot):
            chosen = super().choose(request, loads)
            self._send(request, chosen, late=False)
            return chosen
        blocks = request.blocks
        held: dict[int, int] = {}
        for found in self.directory.match(blocks) if blocks else ():
            held.update((replica, found.blocks) for replica in members(found.replicas))
        weighed = []
        for replica in self._candidates(loads, held):
            saved = request.tokens * held[replica] // len(blocks) if replica in held else 0
            missed, late = self.missed(request, saved, replica, loads[replica])
            cost = loads[replica].cost + PREFILL_WEIGHT * (request.tokens - saved + missed * self._mean_prompt)
            weighed.append((cost, replica, late))
        _, chosen, late = min(weighed, key=lambda one: one[0])
        self._note(chosen, request, held.get(chosen, 0))
        self._send(request, chosen, late=late)
        return chosen

    def _candidates(self, loads: Sequence[ReplicaLoad], held: dict[int, int]) -> list[int]:
        """Those that hold a prefix of it, and the next in turn."""
        ready = [replica for replica in held if loads[replica].accepts_requests]
        first, self._after = self._after, (self._after + 1) % self.replicas
        turn = [*range(first, self.replicas), *range(first)]
        others = [replica for replica in turn if loads[replica].accepts_requests]
        return list(dict.fromkeys([*ready, *others[:MAX_COMPARED]])) or [first]

    def missed(self, request: RouteView, saved: int, replica: int, load: ReplicaLoad) -> tuple[int, bool]:
        """Targets that are expected to be missed if it goes there, its own included; and whether it would be late."""
        work = prefill_work(request.tokens, saved)
        ahead = sum(one.work for one in self._prompts[replica].values() if not one.late)
        late = self.ttft.seconds(ahead + work) > MARGIN * (request.ttft or inf)
        slow = self.tpot.known and self.tpot.seconds(load.requests + 1) > (request.tpot or inf)
        delayed = 0 if late else self._delayed(request, work, replica)
        return (late or slow) + delayed + self._slowed(replica, load), late

    def _delayed(self, request: RouteView, work: float, replica: int) -> int:
        """How many longer prompts would be late because this one goes before them."""
        waiting = [one for one in self._prompts[replica].values() if not one.late]
        waiting.sort(key=lambda one: one.work)
        at, rate, count = request.now + self.ttft.base, self.ttft.slope, 0
        for one in waiting:
            at += rate * one.work
            count += one.work > work and at <= one.deadline < at + rate * work
        return count

    def _slowed(self, replica: int, load: ReplicaLoad) -> int:
        """How many answers would come too slowly beside one more."""
        if not self.tpot.slope:
            return 0
        before, after = self.tpot.seconds(load.requests), self.tpot.seconds(load.requests + 1)
        return sum(before <= one.tpot < after for one in self._answers[replica].values())

    def _send(self, request: RouteView, replica: int, *, late: bool) -> None:
        work, prompts = prefill_work(request.tokens, self.saved), self._prompts[replica]
        deadline, tpot = request.now + (request.ttft or inf), request.tpot or inf
        made = Routed(replica, request.now, work, deadline, tpot, late, alone=not prompts)
        prompts[request.id] = self._requests[request.id] = made
        self._under_way[replica] += 1
        if tpot < inf:
            self._answers[replica][request.id] = made

    # ---- what became of requests ----------------------------------------------------------------------------

    def moved(self, request: RouteView, replica: int) -> None:
        self._send(request, replica, late=False)
        self.offloaded(request.id)

    def offloaded(self, request: Hashable) -> None:
        if (one := self._requests.get(request)) is not None:
            self._prompts[one.replica].pop(request, None)
            one.alone = False

    def first_token(self, request: Hashable, now: float) -> None:
        one = self._requests.get(request)
        if one is None or one.first_token:
            return
        self._prompts[one.replica].pop(request, None)
        one.first_token = now
        if one.alone:
            self.ttft.record(one.work, now - one.sent)

    def ended(self, request: Hashable, now: float, tokens: int) -> None:
        one = self._requests.pop(request, None)
        if one is None:
            return
        self._prompts[one.replica].pop(request, None)
        self._answers[one.replica].pop(request, None)
        if one.first_token and tokens > 1:
            self.tpot.record(self._under_way[one.replica], (now - one.first_token) / (tokens - 1))
        self._under_way[one.replica] -= 1
