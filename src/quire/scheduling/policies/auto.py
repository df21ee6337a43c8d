"""The policy for mixed traffic: slack first, then fairness between tenants, then little work and what is cached.

   -1   must begin, or go on after a pause, to be in time             as they came
    0   can still have its first token in time (or has no target)     by tenant's service, in coarse steps; then by work
        has it                                                        likewise; then as they came
    0.5 has much more time left for its first token than others       likewise; then by work
    1   is too late                                                   as they came

Work is what is left of the prompt behind the prefix cache, and the answer as far as it is expected; of two that look
alike the surer goes first, because an uncertain answer counts as one that may be long. A running sequence is displaced
only by one that can be in time and must begin soon, or has much less left: if it cannot be in time itself, or if its
tokens come so much faster than its target asks for that it can wait for the other to end; it goes on in time. The
latest to come is displaced first: those that take longest anyway are not made to take longer still. `max_wait` bounds
how long any of them waits. Batch work, which others do not wait behind, goes as it came: it is done when its last
answer is.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log2

from quire.scheduling.policies.fair import Fair
from quire.scheduling.policies.pauses import Pauses
from quire.scheduling.policies.sjf import OUTPUT_WEIGHT
from quire.scheduling.policies.srpt import HYSTERESIS, remaining_work
from quire.scheduling.policies.targets import Targets
from quire.scheduling.policies.urgency import Urgency
from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView

FAIR_STEP = 4096.0  # of service, by which tenants must be apart for the order between them to change
DOUBT = 0.1  # weight of how much longer than likely an answer may become


class Auto(Fair):
    starves = True
    late_last = True
    uses_lengths = True

    def __init__(self, options: SchedulerOptions):
        super().__init__(options)
        self._targets = Targets(options)
        self._urgency = Urgency()
        self._pauses = Pauses(options.slo_tpot)
        self._now = 0.0  # as of the last step
        self._work: dict[SequenceId, float] = {}  # of those that wait, or have no first token
        self._answering: set[SequenceId] = set()  # run, and have it
        self._steps: dict[str, float] = {}  # tenants' service beyond the least, in coarse steps

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        if seq.id in self._targets.lost:
            return (1, 0.0, seq.arrival)
        if seq.id in self._pauses.due or seq.id in self._urgency.urgent:
            return (-1, 0.0, seq.arrival)
        step = self._steps.get(seq.tenant, 0.0)
        slack = 0.5 if seq.id in self._targets.relaxed else 0
        if seq.background or seq.id in self._answering:
            return (slack, step, 1, seq.arrival)
        return (slack, step, 0, self._work.get(seq.id, inf))

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        return True

    def defers(self, seq: SequenceView) -> bool:
        return self._targets.others_hurry(seq.id)

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        targets, lost = self._targets, self._targets.lost
        if waiting.id in lost or targets.lost_at(waiting.id) == inf or waiting.background:
            return False
        if waiting.id in targets.relaxed and running.id not in targets.relaxed:
            return False
        urgent = waiting.id in self._urgency.urgent
        if not urgent and HYSTERESIS * remaining_work(waiting) >= remaining_work(running):
            return False
        return running.background or running.id in lost or self._can_wait(running, waiting)

    def _can_wait(self, running: SequenceView, waiting: SequenceView) -> bool:
        """Whether one that is ahead of its target stays so until the other has ended."""
        pace = self._pauses.pace(running, self._now)
        needs = self.services.prefill_seconds(waiting.prompt) + pace * waiting.expected.likely
        return needs < self._pauses.spare(running, self._now, self.services)

    def latency_target(self, running: Iterable[SequenceView]) -> float | None:
        return self._targets.latency()

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        changed: list[SequenceId] = []
        targets = self._targets
        if event.kind is EventKind.COMPUTED:
            return self._computed_step(event)
        if event.kind is EventKind.FIRST_TOKEN:
            for seq, _ in event.sequences:
                self._pauses.drew(seq.id, event.now)
                self._urgency.drew(seq.id)
                targets.drew(seq.id)
                self._answering.add(seq.id)
            return [seq.id for seq, _ in event.sequences]
        self._account(event)
        for seq, _ in event.sequences:
            if event.kind is EventKind.ARRIVED:
                targets.arrived(seq, self.services)
                if (deadline := targets.deadline(seq)) < inf:
                    self._urgency.arrived(seq, deadline, self.services.prefill_seconds(seq.prompt))
                if not seq.background:  # that goes as it came, and is not weighed: a batch of prompts begins at once
                    self._work[seq.id] = self._weigh(seq)
            elif event.kind is EventKind.FINISHED:
                targets.finished(seq.id)
                self._urgency.drew(seq.id)
                self._pauses.finished(seq.id)
                self._work.pop(seq.id, None)
                self._answering.discard(seq.id)
            elif event.kind is EventKind.ADMITTED:
                targets.admitted(seq)
                if seq.drawn:
                    self._answering.add(seq.id)
                if self._pauses.goes_on(seq.id) or seq.drawn:
                    changed.append(seq.id)
            elif event.kind is EventKind.PREEMPTED:
                targets.preempted(seq, self.services)
                self._pauses.paused(seq, event.now, self.services)
                self._work[seq.id] = remaining_work(seq)
                self._answering.discard(seq.id)
                changed.append(seq.id)
        return changed

    def _computed_step(self, event: PolicyEvent) -> list[SequenceId]:
        if self._busy > 1:
            self._account(event)
        self._now = event.now
        moved = self._targets.passed(event.now)
        for id in moved:
            if id in self._targets.lost:
                self._urgency.drew(id)
        return moved + self._urgency.passed(event.now) + self._pauses.passed(event.now) + self._stepped()

    def _weigh(self, seq: SequenceView) -> float:
        likely, high = seq.expected
        cached = self.services.matched(seq.id) if seq.prompt > 0 else 0
        return seq.prompt - cached + OUTPUT_WEIGHT * (likely + DOUBT * (high - likely))

    def _stepped(self) -> list[SequenceId]:
        """Waiting requests of tenants that got so much more, or less, than others that their order changes."""
        if self._busy < 2:
            self._steps.clear()
            return []
        busy = {name: tenant for name, tenant in self._tenants.items() if tenant.live}
        least = min(tenant.counter for tenant in busy.values())
        changed: list[SequenceId] = []
        for name, tenant in busy.items():
            step = float(int(log2(1 + (tenant.counter - least) / FAIR_STEP)))
            if step != self._steps.get(name, 0.0):
                self._steps[name] = step
                changed += tenant.waiting
        return changed

    def gives_up(self, now: float) -> Iterable[str]:
        return self._targets.hopeless() if self.options.slo_give_up and self._targets.lost else ()
