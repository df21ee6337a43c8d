"""By service level: least slack first, the moment by which a request must begin to have its first token in time. Those
that are too late already go last, or end if the operator says so; steps keep to the target for the time per token."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduling.policies.base import Policy
from quire.scheduling.policies.targets import Targets
from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView


class SLO(Policy):
    late_last = True
    observes = tuple(kind for kind in EventKind if kind is not EventKind.DREW)

    def __init__(self, options: SchedulerOptions):
        super().__init__(options)
        self._targets = Targets(options)

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (seq.id in self._targets.lost, self._targets.lost_at(seq.id), seq.arrival)

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        """Whom it is too late for anyway, for one that can still be in time."""
        lost = self._targets.lost
        return running.id in lost and waiting.id not in lost and self._targets.lost_at(waiting.id) < float("inf")

    def latency_target(self, running: Iterable[SequenceView]) -> float | None:
        return self._targets.latency()

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        targets = self._targets
        if event.kind is EventKind.COMPUTED:
            return targets.passed(event.now)
        changed = []
        for seq, _ in event.sequences:
            if event.kind is EventKind.ARRIVED:
                targets.arrived(seq, self.services)
            elif event.kind is EventKind.FINISHED:
                targets.finished(seq.id)
            elif event.kind is EventKind.PREEMPTED:
                targets.preempted(seq, self.services)
                changed.append(seq.id)
            elif targets.admitted(seq) if event.kind is EventKind.ADMITTED else targets.drew(seq.id):
                changed.append(seq.id)
        return changed

    def gives_up(self, now: float) -> Iterable[str]:
        return self._targets.hopeless() if self.options.slo_give_up and self._targets.lost else ()
