"""Longest prefix match first (SGLang): requests of whose prompt most is cached go before others, so that what is shared
is used before it is evicted. Where more than a few wait, only the oldest are compared; the others are served as they
came.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduling.policies.base import Policy
from quire.types.config import SchedulerOptions
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView

COMPARED = 128  # waiting requests
MATCHED_EVERY = 0.1  # seconds between looks at what is cached of them


class LPM(Policy):
    observes = (
        EventKind.ARRIVED,
        EventKind.ADMITTED,
        EventKind.COMPUTED,
        EventKind.PREEMPTED,
        EventKind.FINISHED,
    )

    def __init__(self, options: SchedulerOptions):
        super().__init__(options)
        self._waiting: dict[SequenceId, int] = {}  # tokens matched; 0 until it is compared
        self._looked = 0.0

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (-self._waiting.get(seq.id, 0), seq.arrival)

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        if event.kind is not EventKind.COMPUTED:
            for seq, _ in event.sequences:
                if event.kind in (EventKind.ARRIVED, EventKind.PREEMPTED):
                    self._waiting[seq.id] = self.services.matched(seq.id) if len(self._waiting) < COMPARED else 0
                else:
                    self._waiting.pop(seq.id, None)
            return ()
        if event.now - self._looked < MATCHED_EVERY:
            return ()
        self._looked = event.now
        changed = []
        for id, _ in zip(list(self._waiting), range(COMPARED), strict=False):
            if (matched := self.services.matched(id)) != self._waiting[id]:
                self._waiting[id] = matched
                changed.append(id)
        return changed
