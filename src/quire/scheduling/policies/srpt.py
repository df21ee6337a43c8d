"""Shortest remaining processing time, by predicted work: a waiting request displaces a running one that has more than
twice as much left. An answer that outgrows its prediction is expected to go on for half as long again."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduling.policies.base import Policy
from quire.scheduling.policies.sjf import OUTPUT_WEIGHT
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView

HYSTERESIS = 2.0  # times as much work left as the one it makes way for
RANKED_EVERY = 32  # output tokens between looks at what is left of a running sequence


def remaining_work(seq: SequenceView) -> float:
    """In tokens of a prompt; what was lost to preemption counts again."""
    drawn = seq.drawn
    left = max(seq.expected.likely - drawn, drawn / 2, 1.0)
    return max(0, seq.prompt + drawn - seq.computed) + OUTPUT_WEIGHT * min(left, seq.remaining)


class SRPT(Policy):
    uses_lengths = True
    observes = (EventKind.DREW, EventKind.PREEMPTED)

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (remaining_work(seq),)

    def displaces(self, waiting: SequenceView, running: SequenceView) -> bool:
        return HYSTERESIS * remaining_work(waiting) < remaining_work(running)

    def observe(self, event: PolicyEvent) -> Iterable[SequenceId]:
        if event.kind is EventKind.PREEMPTED:
            return [seq.id for seq, _ in event.sequences]
        return [seq.id for seq, tokens in event.sequences if seq.drawn % RANKED_EVERY < tokens]
