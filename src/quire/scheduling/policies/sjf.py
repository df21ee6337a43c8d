"""Shortest job first, by predicted work: its prompt and the answer it is expected to have. Nothing is displaced."""

from __future__ import annotations

from quire.scheduling.policies.base import Policy
from quire.types.policy import SequenceView

OUTPUT_WEIGHT = 4.0  # what a token of the answer costs, in tokens of a prompt: batched decoding against prefill


def total_work(seq: SequenceView) -> float:
    """In tokens of a prompt."""
    return seq.prompt + OUTPUT_WEIGHT * seq.expected.likely


class SJF(Policy):
    uses_lengths = True

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (total_work(seq),)
