"""Multi-level feedback queues with skip-join (FastServe): no lengths are predicted.

A request joins at the level whose quantum its prompt fits, skipping those where it would only be demoted; with the
service it attains it goes down, level by level, and a waiting request displaces those of lower levels. Within a level,
first come, first served.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from quire.scheduling.policies.base import Policy
from quire.scheduling.policies.sjf import OUTPUT_WEIGHT
from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView

QUANTA = tuple(512.0 * 4**level for level in range(6))  # of each level, in tokens of a prompt


def level_of(seq: SequenceView) -> int:
    return bisect_left(QUANTA, seq.prompt + OUTPUT_WEIGHT * seq.drawn)


class MLFQ(Policy):
    observes = (EventKind.DREW, EventKind.FINISHED)

    def __init__(self, options: SchedulerOptions):
        super().__init__(options)
        self._levels: dict[SequenceId, int] = {}  # of those that were demoted

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (level_of(seq), seq.arrival)

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        return level_of(waiting) < level_of(running)

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        changed = []
        for seq, _ in event.sequences:
            if event.kind is EventKind.FINISHED:
                self._levels.pop(seq.id, None)
            elif (level := level_of(seq)) != self._levels.get(seq.id):
                self._levels[seq.id] = level
                changed.append(seq.id)
        return changed
