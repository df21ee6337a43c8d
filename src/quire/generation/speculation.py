"""Guessing ahead: drafts in, and of what was drawn at their positions the part that counts.

A row with a draft becomes several rows of one token each, all of the same slot: K and V of a step are written before
any row attends, so each of them sees those before it. A token is then drawn at every one of these positions, from the
target's own logits with that position's own noise, as if all before it were settled:

    slot      ... t8 t9 | d0  d1  d2        known tokens, then the draft
    drawn            s0   s1  s2  s3        s0 == d0, s1 == d1, s2 != d2:  s0 s1 s2 count, s3 is forgotten

Noise is a function of (seed, branch, position, token), so the tokens that count are those that steps of one token
would have drawn: greedy or sampled, the output is the same with drafts as without.

Refuses to know: pages, logits, who drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from quire.types.plan import Row, Sample, StepPlan, Write
from quire.types.seams import DraftContext, Proposer

Verify = Callable[[Sequence[int], Sequence[int]], int]


def verify(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a draft count: those that equal what was drawn in their places."""
    right = 0
    while right < len(draft) and draft[right] == drawn[right]:
        right += 1
    return right


@dataclass(frozen=True)
class Expanded:
    """A plan with its drafts spelled out."""

    plan: StepPlan
    drafts: list[list[int]]  # one per sample of the original plan: empty where nothing was guessed

    def samples(self) -> Iterator[tuple[Sample, list[int]]]:
        """The original samples, as places in this plan, with their drafts."""
        at = 0
        for draft in self.drafts:
            yield self.plan.samples[at], draft
            at += len(draft) + 1


class Speculation:
    """What a worker knows of its sequences' tokens, and who guesses on."""

    def __init__(self, proposer: Proposer, verify: Verify = verify, *, sees: tuple[int, ...] | None = None):
        """`sees`: layers behind which the proposer sees hidden states, besides the last; None: not even that."""
        self._proposer = proposer
        self.sees = sees
        self._contexts: dict[int, DraftContext] = {}
        self._verify = verify

    def expand(self, plan: StepPlan) -> Expanded:
        """Follow the plan's changes of slots, ask for drafts, and lay them out as rows and samples."""
        self._follow(plan)
        drafts = self._propose(plan.rows)
        if not any(drafts):
            return Expanded(plan, [[]] * len(plan.samples))
        rows: list[Row] = []
        places = []  # of each row among the new ones
        writes = list(plan.writes)
        for row, draft in zip(plan.rows, drafts, strict=True):
            places.append(len(rows))
            end = row.start + row.count
            rows += [row, *(Row(row.slot, at, 1, shift=row.shift) for at in range(end, end + len(draft)))]
            if draft:
                writes.append(Write(row.slot, end, draft))
        samples = [
            Sample(places[s.row] + i, s.slot, s.position + i)
            for s in plan.samples
            for i in range(len(drafts[s.row]) + 1)
        ]
        expanded = replace(plan, rows=rows, samples=samples, writes=writes)
        return Expanded(expanded, [drafts[s.row] for s in plan.samples])

    def _follow(self, plan: StepPlan) -> None:
        for slot in plan.frees:
            if context := self._contexts.pop(slot, None):
                self._proposer.forget(context)
        for admit in plan.admits:
            self._contexts[admit.slot] = DraftContext(admit)
        for write in plan.writes:
            tokens = self._contexts[write.slot].tokens
            if tokens[write.start :] != write.tokens:  # chosen elsewhere, by a search
                tokens[write.start :] = write.tokens

    def _propose(self, rows: list[Row]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in rows]
        asked = [i for i, row in enumerate(rows) if row.drafts]
        if asked:
            budgets = [rows[i].drafts for i in asked]
            found = self._proposer.propose([self._contexts[rows[i].slot] for i in asked], budgets)
            for i, budget, draft in zip(asked, budgets, found, strict=True):
                drafts[i] = draft[:budget]
        return drafts

    def settled(self, draft: list[int], drawn: list[int]) -> list[int]:
        """The tokens that count, of those drawn along a draft."""
        right = self._verify(draft, drawn)
        return [*draft[:right], drawn[right]]

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: Any = None) -> None:
        """These are the tokens of a slot from `position` on, drawn (but those forced) from these hidden states."""
        context = self._contexts.get(slot)
        if context is not None and len(context.tokens) == position:
            context.tokens += tokens
            context.hidden = hidden
            self._proposer.observe(context, tokens)
            context.hidden = None
