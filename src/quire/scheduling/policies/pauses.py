"""Who can afford to be paused: answers that come faster than their target for each token asks for.

A target for each token is a mean over the answer, so one that is ahead of it may wait and still end in time. What it
has to spare is what its target allows for the whole answer, less the time since its first token, less what the rest
takes at the pace it had so far. Refuses to know: orders.
"""

from __future__ import annotations

from quire.scheduling.policies.sequence_heap import SequenceHeap
from quire.types.policy import PolicyServices, SequenceId, SequenceView

MARGIN = 0.5  # of what an answer has to spare, that a pause may use: lengths and paces are guesses


class Pauses:
    def __init__(self, tpot: float | None):
        """`tpot`: target of those that have none of their own."""
        self._tpot = tpot or 0.0
        self._first: dict[SequenceId, float] = {}  # when those under way drew their first token
        self._until = SequenceHeap()  # when those that are paused must go on
        self.due: set[SequenceId] = set()  # of them, those that must go on now

    def drew(self, id: SequenceId, now: float) -> None:
        """It has its first token."""
        self._first.setdefault(id, now)

    def finished(self, id: SequenceId) -> None:
        self._first.pop(id, None)
        self.goes_on(id)

    def pace(self, seq: SequenceView, now: float) -> float:
        """Seconds between its tokens, on the mean."""
        return max(0.0, now - self._first.get(seq.id, now)) / max(1, seq.drawn - 1)

    def spare(self, seq: SequenceView, now: float, services: PolicyServices) -> float:
        """Seconds that it may be paused; 0 where it has no target to be ahead of."""
        target, first = seq.tpot_target or self._tpot, self._first.get(seq.id)
        if not target or first is None or seq.drawn < 2:
            return 0.0
        left = max(1.0, min(seq.expected.likely - seq.drawn, seq.remaining))
        again = services.prefill_seconds(seq.prompt + seq.drawn)  # if none of it is cached then
        return MARGIN * (target * (seq.drawn + left - 1) - (now - first) - self.pace(seq, now) * left - again)

    def paused(self, seq: SequenceView, now: float, services: PolicyServices) -> None:
        if (spare := self.spare(seq, now, services)) > 0:
            self._until.put(seq.id, now + spare)

    def goes_on(self, id: SequenceId) -> bool:
        """It is no longer paused; whether it had to go on."""
        self._until.drop(id)
        due = id in self.due
        self.due.discard(id)
        return due

    def passed(self, now: float) -> list[SequenceId]:
        """Those that must go on, since the last look."""
        found = self._until.take_below(now)
        self.due.update(found)
        return found
