"""What engines did before paging, as policies: iteration-level batching over contiguous memory, which a sequence has
from its first token to its last, so that as much must be set aside for it as it might need.

    Maximum       the longest that any request may become            FasterTransformer, LightSeq, Orca (Max)
    PowerOfTwo    its own length, rounded up to a power of two       Orca (Pow2), if an oracle told lengths so roughly
    Oracle        its own length                                     Orca (Oracle): what cannot be known in advance

Lengths are prompt and limit together: in a benchmark that ignores stop tokens, what an answer becomes.
"""

from __future__ import annotations

from quire.scheduling.policies import FCFS
from quire.types.policy import SequenceView


class Oracle(FCFS):
    contiguous = True

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        return False

    def reserve(self, seq: SequenceView, longest: int) -> int:
        return seq.prompt + seq.drawn + seq.remaining


class PowerOfTwo(Oracle):
    def reserve(self, seq: SequenceView, longest: int) -> int:
        return 1 << (super().reserve(seq, longest) - 1).bit_length()


class Maximum(Oracle):
    def reserve(self, seq: SequenceView, longest: int) -> int:
        return longest
