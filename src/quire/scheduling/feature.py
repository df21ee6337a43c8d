"""What a scheduling feature may hear of, and where it may take part: one class, every method optional.

The sequence table calls these, in one place, for every feature in the order they are registered; a feature keeps its
own state by sequence. Listening:

    arrived ─► admitted ─► step_planned ... drew ... step_landed ─► finished ─► released
                   ▲                  │
                   └──── preempted ───┘     (released too, once no step in flight uses its pages)

Taking part: `holds` keeps a waiting sequence from starting, `takes_over` plans the rows of one that has just started,
`contribute` adds to every plan, `reclaim` gives up KV pages when memory is short.
"""

from __future__ import annotations

from quire.memory.manager import Hit, PageTable
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.plan import StepResult
from quire.types.request import FinishReason


class SchedulingFeature:
    # ---- listening ------------------------------------------------------------------------------------------

    def arrived(self, seq: Sequence) -> None:
        """A sequence waits for its first admission."""

    def admitted(self, seq: Sequence, hit: Hit | None) -> None:
        """It has pages and is about to get a slot, for the first time or again; without a hit, as a fork."""

    def step_planned(self, step: PlanBuilder) -> None:
        """A step is on its way, with all its rows."""

    def drew(self, seq: Sequence, drafted: int, accepted: int, forced: int) -> None:
        """A first token was drawn, or some that are not plain draws: drafts were verified, a grammar forced tokens."""

    def preempted(self, seq: Sequence) -> None:
        """It is about to lose its pages."""

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        """A step is over, and what it brought is about to be committed."""

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        """It is over. Without a reason, only for the scheduler: a beam that lost, a chunk that is computed."""

    def released(self, seq: Sequence) -> None:
        """Its slot and pages are being given back."""

    # ---- taking part ----------------------------------------------------------------------------------------

    def holds(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Whether a waiting sequence must wait on, because pages for it are on their way."""
        return False

    def takes_over(self, builder: PlanBuilder, seq: Sequence, hit: Hit, count: int) -> bool:
        """Whether the feature plans the rows of a sequence that starts now, whose first would have `count` tokens."""
        return False

    def contribute(self, builder: PlanBuilder) -> None:
        """Add to the plan, after running sequences have their rows and before waiting ones are admitted."""

    def reclaim(self, *, running: bool) -> bool:
        """Memory is short for a running sequence, or for a waiting one: give up pages kept for later use. Whether there
        were any."""
        return False

    # ---- keeping house --------------------------------------------------------------------------------------

    def tables(self) -> list[PageTable]:
        """Page tables that the feature holds beside those of sequences."""
        return []

    def step_failed(self) -> None:
        """A step failed: pages' contents can no longer be trusted."""

    def reset(self) -> None:
        """Give up what is cached or held for later, and start counting anew."""
