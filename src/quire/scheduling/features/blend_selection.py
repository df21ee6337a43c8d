"""Which tokens of reused chunks are computed again: those that the question pays most attention to.

KV of a chunk that was computed elsewhere is wrong by what its new neighbours would have changed, and an answer by how
much of that it reads. Attention of the question, computed over the chunks as they are, says which tokens it reads; the
first layers, computed anew (a probe), how far they deviate. Refuses to know: pages, plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from quire.scheduling.sequence import Sequence
from quire.types.blend import Blend

Span = tuple[int, int]  # positions [start, end)
MAX_LOOKING = 256  # tokens behind the last chunk whose attention counts


@dataclass
class BlendedPrompt:
    """A request between its start and its first token."""

    seq: Sequence
    covered: list[Span]  # what was shifted
    exact: int  # where computing begins: all before it was found as it is
    probed: int  # positions before this are probed, or about to be
    end: int  # probed up to here
    looks: list[Span]  # to compute before choosing
    looking: int  # where the tokens begin whose attention counts
    awaited: int = 0  # probes and looks in flight
    deviations: dict[int, list[float]] = field(default_factory=dict)  # by first position
    mass: np.ndarray | None = None  # attention paid to each position
    runs: list[Span] | None = None  # to compute; None: not known yet

    @classmethod
    def of(cls, seq: Sequence, blend: Blend, covered: list[Span], exact: int) -> BlendedPrompt:
        shifted, end = sum(last - first for first, last in covered), covered[-1][1]
        looks = _runs(exact, seq.known, np.zeros(0, np.int64), covered)
        if sum(last - first for first, last in looks if first > covered[0][0]) > shifted // 2:
            looks = []  # to compute them twice would take longer than it saves: deviations alone must do
        prompt = cls(seq, covered, exact, exact, end, looks, max(end, seq.known - MAX_LOOKING))
        if blend.recompute == 0 or (blend.recompute == 1 and not blend.max_error):
            prompt.choose(blend)
        return prompt

    @property
    def looked(self) -> bool:
        return not self.awaited and not self.looks and self.probed == self.end

    def choose(self, blend: Blend) -> tuple[int, float | None]:
        """What to compute: of the shifted tokens those that the question pays most attention to, else those that
        deviate most, and all others. Returns how many, and the error that is left: how far the values of the others
        deviate, weighted by attention; None: nobody looked."""
        shifted = np.concatenate([np.arange(*span) for span in self.covered])
        chosen, error = shifted[: math.floor(blend.recompute) * len(shifted)], None
        if self.deviations:
            found = np.array([change for at in sorted(self.deviations) for change in self.deviations[at]])
            changed = np.sqrt(found[shifted - self.exact])
            mass = np.ones(len(shifted)) if self.mass is None else self.mass[shifted]
            order = np.argsort(-changed if self.mass is None else -mass, kind="stable")
            error_at = np.append(np.cumsum((mass * changed)[order][::-1])[::-1], 0.0) / max(mass.sum(), 1e-30)
            count = min(math.ceil(blend.recompute * len(shifted)), int((error_at > blend.max_error).sum()))
            chosen, error = shifted[order[:count]], float(error_at[count])
        first = self.exact if self.mass is None else self.covered[0][0]  # what was looked at before that is exact
        self.runs = _runs(first, self.seq.known, chosen, self.covered)
        return len(chosen), error


def _runs(first: int, end: int, chosen: np.ndarray, covered: list[Span]) -> list[Span]:
    """Runs of positions from `first` to `end` that are chosen, or not covered."""
    wanted = np.ones(end - first, bool)
    for start, last in covered:
        wanted[start - first : last - first] = False
    wanted[chosen - first] = True
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])))) + first
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
