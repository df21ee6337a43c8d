"""The sequences of one request: branches that are sampled independently, unless a search says otherwise."""

from __future__ import annotations

from quire.scheduling.sequence import Sequence
from quire.types.request import Request, Status


class SequenceGroup:
    def __init__(self, request: Request, sequences: list[Sequence]):
        self.request = request
        self.sequences = sequences

    @property
    def live(self) -> list[Sequence]:
        """Those that have not ended."""
        return [seq for seq in self.sequences if seq.status is not Status.FINISHED]
