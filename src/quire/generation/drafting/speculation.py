"""Guessing ahead: drafts in, and of what was drawn at their positions the part that counts.

A row with a draft becomes several rows of one token each, all of the same slot: K and V of a step are written before
any row attends, so each of them sees those before it. A token is then drawn at every one of these positions, from the
target's own logits with that position's own noise, as if all before it were settled:

    slot      ... t8 t9 | d0  d1  d2        known tokens, then the draft
    drawn            s0   s1  s2  s3        s0 == d0, s1 == d1, s2 != d2:  s0 s1 s2 count, s3 is forgotten

A draft may be a tree. Its guesses lie side by side behind the sequence, each at the position that its depth gives it,
and each row sees only the branch that it ends (`kernels.attention.Paths`); what counts is the branch that was drawn:

    slot      ... t8 t9 | a   b   c   d     a and b follow t9, c follows a, d follows b
    drawn            b    .   d   .   e     b, then d after it, then e: K and V of b and d move to where a and b were

Noise is a function of (seed, branch, position, token), so the tokens that count are those that steps of one token
would have drawn: greedy or sampled, the output is the same with drafts as without.

Refuses to know: pages, logits, who drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from quire.types.plan import Row, Sample, StepPlan, Write
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftContext, Proposer, Tree

T = TypeVar("T")
Verify = Callable[[Sequence[int], Sequence[int]], int]


def verify(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a draft count: those that equal what was drawn in their places."""
    right = 0
    while right < len(draft) and draft[right] == drawn[right]:
        right += 1
    return right


def climb(tree: Tree, drawn: Sequence[int]) -> list[int]:
    """The draws that count, of one before a tree and one after each of its guesses: which they are, in order."""
    found, node = [0], -1
    follows = dict(zip(zip(tree.parents, tree.tokens, strict=True), range(len(tree.tokens)), strict=True))
    while (child := follows.get((node, drawn[found[-1]]))) is not None:
        node = child
        found.append(node + 1)
    return found


@dataclass(frozen=True)
class Branch:
    """A row of a tree: where the tree begins, how deep in it the row is, and the places of those it follows and itself,
    four bits each."""

    base: int
    depth: int
    path: int


def branches(tree: Tree, base: int) -> list[Branch]:
    found: list[Branch] = []
    for place, parent in enumerate(tree.parents):
        before = found[parent] if parent >= 0 else Branch(base, -1, 0)
        depth = before.depth + 1
        found.append(Branch(base, depth, before.path | place << 4 * depth))
    return found


@dataclass(frozen=True)
class Expanded:
    """A plan with its drafts spelled out."""

    plan: StepPlan
    drafts: list[list[int] | Tree]  # one per sample of the original plan: empty where nothing was guessed
    branches: dict[int, Branch] = field(default_factory=dict)  # by row, of those that are in trees
    places: list[int] | None = None  # of the original rows among this plan's; None: these are the original rows

    def by_original_row(self, found: dict[int, T]) -> dict[int, T]:
        """What a step found by rows of this plan, by rows of the original one: results must know of no drafts."""
        if self.places is None:
            return found
        return {row: found[place] for row, place in enumerate(self.places) if place in found}

    def samples(self) -> Iterator[tuple[Sample, list[int] | Tree, int]]:
        """The original samples, as places in this plan, with their drafts and how many draws those come to."""
        at = 0
        for draft in self.drafts:
            draws = 1 + len(draft.tokens if isinstance(draft, Tree) else draft)
            yield self.plan.samples[at], draft, draws
            at += draws


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
        depths: list[range | list[int]] = []  # of each row's guesses
        found: dict[int, Branch] = {}
        writes = list(plan.writes)
        for row, draft in zip(plan.rows, drafts, strict=True):
            places.append(len(rows))
            end = row.start + row.count
            tokens = draft.tokens if isinstance(draft, Tree) else draft
            rows += [row, *(Row(row.slot, at, 1, shift=row.shift) for at in range(end, end + len(tokens)))]
            if tokens:
                writes.append(Write(row.slot, end, tokens))
            if isinstance(draft, Tree):
                grown = branches(draft, end)
                found |= {places[-1] + 1 + i: branch for i, branch in enumerate(grown)}
                depths.append([0, *(branch.depth + 1 for branch in grown)])
            else:
                depths.append(range(len(draft) + 1))
        samples = [
            Sample(places[s.row] + i, s.slot, s.position + depth)
            for s in plan.samples
            for i, depth in enumerate(depths[s.row])
        ]
        expanded = replace(plan, rows=rows, samples=samples, writes=writes)
        return Expanded(expanded, [drafts[s.row] for s in plan.samples], found, places)

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

    def _propose(self, rows: list[Row]) -> list[list[int] | Tree]:
        drafts: list[list[int] | Tree] = [[] for _ in rows]
        asked = [i for i, row in enumerate(rows) if row.drafts]
        if asked:
            contexts = [self._contexts[rows[i].slot] for i in asked]
            found = self._proposer.propose(contexts, [rows[i].drafts for i in asked])
            for i, context, draft in zip(asked, contexts, found, strict=True):
                if isinstance(draft, Tree) and (rows[i].shift or _remembers(context.admit.params)):
                    draft = draft.trunk()
                drafts[i] = draft if isinstance(draft, Tree) else draft[: rows[i].drafts]
        return drafts

    def settled(self, draft: list[int] | Tree, drawn: list[int]) -> tuple[list[int], list[int]]:
        """The tokens that count, of those drawn along a draft, and which draws they are."""
        if isinstance(draft, Tree):
            which = climb(draft, drawn)
            return [drawn[i] for i in which], which
        right = self._verify(draft, drawn)
        return [*draft[:right], drawn[right]], list(range(right + 1))

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: Any = None) -> None:
        """These are the tokens of a slot from `position` on, drawn (but those forced) from these hidden states."""
        context = self._contexts.get(slot)
        if context is not None and len(context.tokens) == position:
            context.tokens += tokens
            context.hidden = hidden
            self._proposer.observe(context, tokens)
            context.hidden = None


def _remembers(params: SamplingParams) -> bool:
    """Whether draws depend on the tokens before them, or masks are made along a draft: one history, so one branch."""
    penalties = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1
    return bool(penalties or params.bad_words or params.bad_token_ids or params.grammar)
