"""Static batching, the baseline: first come, first served, over an allocator that reserves contiguous memory for the
longest prompt and answer of a batch, and starts a batch when the last one has wholly ended."""

from __future__ import annotations

from quire.scheduling.policies.fcfs import FCFS
from quire.types.policy import SequenceView


class Static(FCFS):
    contiguous = True

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        return False
