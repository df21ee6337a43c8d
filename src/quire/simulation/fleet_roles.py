"""Prefill and decode roles of a simulated fleet, decided on as a cluster's are.

    request ──► router: who answers ──► computed there, or by a prefill replica first, whose pages then are there too

Pages are there with the next report after the prefill has ended; requests of a replica whose role changes end where
they are, which a cluster would move. Refuses to know: routing, what replicas do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.cluster.roles import DECODE, PREFILL, PoolSample, PrefillCosts, RoleBalancer
from quire.cluster.router_policy import REQUEST_TOKENS, ReplicaLoad
from quire.simulation.replica import Kind

INTERVAL_S = 1.0  # between looks at both pools' work


class Routed(NamedTuple):
    request: int  # its number in the trace
    replica: int
    kind: Kind = Kind.PLAIN
    need: int = 0  # tokens of its prompt that the router expects to be computed there


class FleetRoles:
    def __init__(self, replicas: int, prefill: int, *, switch: bool):
        """`switch`: roles follow the load."""
        self._roles = [PREFILL if number < prefill else DECODE for number in range(replicas)]
        self._costs = PrefillCosts()
        self._balancer = RoleBalancer() if switch else None
        self._decoders: dict[int, int] = {}  # of requests whose prompts are being computed
        self._next = INTERVAL_S
        self._awaited: Counter[int] = Counter()  # requests that wait for their pages, by who will answer them
        self.switches = 0
        self.prefill_peak = prefill

    @property
    def busy(self) -> bool:
        """Whether prompts are being computed for others."""
        return bool(self._decoders)

    def weigh(self, loads: Sequence[ReplicaLoad]) -> None:
        """Loads as the router is to see them: with requests that wait for their pages, and where none is sent to."""
        for number, load in enumerate(loads):
            load.requests += self._awaited[number]
            load.accepts_requests = self._roles[number] != PREFILL

    def offload(self, request: int, need: int, decoder: int, loads: Sequence[ReplicaLoad]) -> int | None:
        """The prefill replica that computes a prompt; None: it is computed where it is answered."""
        prefill = min((n for n, role in enumerate(self._roles) if role == PREFILL), key=lambda n: loads[n].tokens)
        if not self._costs.should_prefill_remotely(need, loads[decoder], loads[prefill], 0):
            return None
        self._decoders[request] = decoder
        self._awaited[decoder] += 1
        return prefill

    def prefilled(self, requests: Iterable[int]) -> list[Routed]:
        """Of prompts that were computed, who answers: one that only prefills by now does so all the same."""
        found = [Routed(request, self._decoders.pop(request), Kind.HANDED_OVER) for request in sorted(requests)]
        self._awaited.subtract(one.replica for one in found)
        return found

    def look(self, now: float, loads: Sequence[ReplicaLoad]) -> None:
        """Change a role where that pays; `loads`: as replicas reported them."""
        if self._balancer is None or now < self._next:
            return
        self._next = now + INTERVAL_S
        pools = {role: [n for n, one in enumerate(self._roles) if one == role] for role in (PREFILL, DECODE)}
        work = [load.tokens + REQUEST_TOKENS * load.requests for load in loads]
        sample = PoolSample(
            len(pools[PREFILL]),
            len(pools[DECODE]),
            sum(loads[n].tokens for n in pools[PREFILL]),
            sum(work[n] for n in pools[DECODE]),
        )
        if (decision := self._balancer.decide(now, sample)) is not None:
            giving = pools[DECODE if decision.role == PREFILL else PREFILL]
            self._roles[min(giving, key=lambda n: work[n])] = decision.role
            self.switches += 1
            self.prefill_peak = max(self.prefill_peak, self._roles.count(PREFILL))
