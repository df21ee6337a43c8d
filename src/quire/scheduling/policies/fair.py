"""Fair between tenants: virtual token counters (VTC), with weights.

Each tenant has a counter of the service it got, divided by its weight; the least served goes first, and whoever comes
back after having nothing to do is lifted to the least of those who had. Service is what was delivered: prompt tokens
computed (a prefix hit is free, what is computed again after a preemption is not charged twice) and tokens of answers,
which count double. Of each tenant only the first few waiting requests take part; the others come after them. A tenant
that is alone is charged when another comes, and for what ends or is preempted before.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from quire.scheduling.policies.base import Policy
from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView

OUTPUT_CHARGE = 2.0  # of a token of the answer; one of the prompt is charged 1
COMPARED = 8  # waiting requests of a tenant that have their place by its counter


class Tenant:
    __slots__ = ("counter", "live", "waiting", "weight")

    def __init__(self) -> None:
        self.counter = 0.0
        self.weight = 1.0
        self.live = 0  # requests waiting or running
        self.waiting: dict[SequenceId, int] = {}  # tokens of their prompts, in the order they came


class Fair(Policy):
    starves = False
    observes = tuple(kind for kind in EventKind if kind is not EventKind.DREW)

    def __init__(self, options: SchedulerOptions):
        super().__init__(options)
        self._tenants: dict[str, Tenant] = {}
        self._busy = 0  # tenants that have requests
        self._charged: dict[SequenceId, int] = {}  # tokens of each that its tenant has paid for, or had for nothing
        self._places: dict[SequenceId, float] = {}  # of those that are compared

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        place = self._places.get(seq.id)
        return (0, place, seq.arrival) if place is not None else (1, seq.arrival, 0.0)

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        """Within a tenant: another's would take the pages that the first waits for."""
        return blocked.tenant == behind.tenant

    def counter(self, tenant: str) -> float:
        """Service a tenant got, over its weight."""
        return self._tenants[tenant].counter

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        if event.kind is EventKind.FIRST_TOKEN:
            return ()
        return [id for name in self._account(event) for id in self._placed(self._tenants[name])]

    def _account(self, event: PolicyEvent) -> Iterable[str]:
        """Keep the tenants' counters; returns whose."""
        touched: dict[str, None] = {}
        if event.kind is EventKind.COMPUTED:  # of all that run, with every step
            if self._busy > 1:
                for seq, _ in event.sequences:
                    touched[seq.tenant] = None
                    self._charge(seq)
            return touched
        for seq, tokens in event.sequences:
            if (tenant := self._tenants.get(seq.tenant)) is None:
                tenant = self._tenants[seq.tenant] = Tenant()
            if event.kind is EventKind.ARRIVED:
                self._arrived(tenant, seq)
            elif event.kind is EventKind.ADMITTED:
                tenant.waiting.pop(seq.id, None)
                self._charged.setdefault(seq.id, tokens)
            elif event.kind is EventKind.PREEMPTED:
                self._charge(seq)
                tenant.waiting = {seq.id: 0, **tenant.waiting}
            elif event.kind is EventKind.FINISHED:
                self._finished(tenant, seq)
            touched[seq.tenant] = None
        return touched

    def _arrived(self, tenant: Tenant, seq: SequenceView) -> None:
        if not tenant.live:
            self._busy += 1
            if self._busy == 2:
                for one in self.services.running():
                    self._charge(one)
            busy = [other.counter for other in self._tenants.values() if other.live]
            tenant.counter = max(tenant.counter, min(busy, default=tenant.counter))
        tenant.weight = max(seq.weight, 1e-6)
        tenant.live += 1
        tenant.waiting[seq.id] = seq.prompt

    def _charge(self, seq: SequenceView) -> None:
        tenant, paid, now = self._tenants[seq.tenant], self._charged.get(seq.id, 0), seq.computed
        if now > paid:
            outputs = max(0, now - max(paid, seq.prompt))
            tenant.counter += (now - paid + (OUTPUT_CHARGE - 1) * outputs) / tenant.weight
            self._charged[seq.id] = now

    def _finished(self, tenant: Tenant, seq: SequenceView) -> None:
        self._charge(seq)
        tenant.live -= 1
        self._busy -= not tenant.live
        tenant.waiting.pop(seq.id, None)
        self._charged.pop(seq.id, None)
        self._places.pop(seq.id, None)

    def _placed(self, tenant: Tenant) -> list[SequenceId]:
        """Where the first of a tenant's waiting requests come, each after what those before it will be charged."""
        place, changed = tenant.counter, []
        for id, tokens in islice(tenant.waiting.items(), COMPARED):
            if self._places.get(id) != place:
                self._places[id] = place
                changed.append(id)
            place += tokens / tenant.weight
        return changed
