"""What a policy may ask of its scheduler: how long prompts take, and what of them is cached."""

from __future__ import annotations

from collections.abc import Iterator

from quire.memory.manager import KVManager
from quire.scheduling.prefill_budget import PrefillLimiter
from quire.scheduling.sequence_table import SequenceTable
from quire.types.policy import SequenceId, SequenceView


class Services:
    def __init__(self, sequences: SequenceTable, memory: KVManager, limiter: PrefillLimiter):
        self._sequences = sequences
        self._memory = memory
        self._limiter = limiter

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        return self._limiter.seconds(start, tokens)

    def matched(self, sequence: SequenceId) -> int:
        seq = self._sequences.by_id(sequence)
        self._memory.hash_pages(seq.table, seq.tokens, seq.request.salt)
        return self._memory.matched(seq.table, seq.reusable)

    def running(self) -> Iterator[SequenceView]:
        return (seq.view for seq in self._sequences.running)
