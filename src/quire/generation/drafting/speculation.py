"""Speculative decoding: drafts laid out as rows and samples, and the verification of what was sampled along them.

A row with a draft becomes several rows of one token each, all of the same slot: K and V of a step are written before
any row attends, so each of them sees those before it. A token is then sampled at every one of these positions, from
the target's own logits with that position's own noise, as if all draft tokens before it were accepted:

    slot      ... t8 t9 | d0  d1  d2        known tokens, then the draft
    sampled          s0   s1  s2  s3        s0 == d0, s1 == d1, s2 != d2:  s0 s1 s2 are accepted, s3 is discarded

A draft may be a tree. Its tokens lie side by side behind the sequence, each at the position that its depth gives it,
and each row attends only to the branch that it ends (`kernels.attention_backend.Paths`); the branch that was sampled
is accepted:

    slot      ... t8 t9 | a   b   c   d     a and b follow t9, c follows a, d follows b
    sampled          b    .   d   .   e     b, then d after it, then e: K and V of b and d move to where a and b were

Noise is a function of (seed, branch, position, token), so the accepted tokens are those that steps of one token would
have sampled: greedy or not, the output is the same with drafts as without.

Refuses to know: pages, logits, how proposers draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from quire.types.plan import Row, Sample, StepPlan, Write
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftContext, DraftTree, Proposer

T = TypeVar("T")
Draft = list[int] | DraftTree
Verify = Callable[[Sequence[int], Sequence[int]], int]


def verify(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many tokens of a draft are accepted: those that equal what was sampled at their positions."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == sampled[accepted]:
        accepted += 1
    return accepted


def verify_tree(tree: DraftTree, sampled: Sequence[int]) -> list[int]:
    """Indices of the accepted samples, in order, of one before a tree and one after each of its tokens."""
    accepted, node = [0], -1
    children = dict(zip(zip(tree.parents, tree.tokens, strict=True), range(len(tree.tokens)), strict=True))
    while (child := children.get((node, sampled[accepted[-1]]))) is not None:
        node = child
        accepted.append(node + 1)
    return accepted


@dataclass(frozen=True)
class TreeRow:
    """A row of a draft tree: where the tree begins, the row's depth in it, and the path to it, itself included, as
    indices of four bits each."""

    base: int
    depth: int
    path: int


def tree_rows(tree: DraftTree, base: int) -> list[TreeRow]:
    rows: list[TreeRow] = []
    for index, parent in enumerate(tree.parents):
        before = rows[parent] if parent >= 0 else TreeRow(base, -1, 0)
        depth = before.depth + 1
        rows.append(TreeRow(base, depth, before.path | index << 4 * depth))
    return rows


@dataclass(frozen=True)
class ExpandedPlan:
    """A plan with its drafts laid out as rows and samples."""

    plan: StepPlan
    drafts: list[Draft]  # one per sample of the original plan: empty where there is none
    tree_rows: dict[int, TreeRow] = field(default_factory=dict)  # by row
    row_index: list[int] | None = None  # of each original row among this plan's; None: these are the original rows
    late: frozenset[int] = frozenset()  # samples of this plan that are drawn when the step is on its way

    @classmethod
    def without_drafts(cls, plan: StepPlan) -> ExpandedPlan:
        return cls(plan, [[]] * len(plan.samples))

    def by_original_row(self, found: dict[int, T]) -> dict[int, T]:
        """Values by rows of this plan → by rows of the original one: results know of no drafts."""
        if self.row_index is None:
            return found
        return {row: found[index] for row, index in enumerate(self.row_index) if index in found}

    def split(self) -> tuple[list[Sample], list[Sample]]:
        """Samples that are drawn with the step, and late ones."""
        samples, late = self.plan.samples, self.late
        if not late:
            return samples, []
        return [s for i, s in enumerate(samples) if i not in late], [samples[i] for i in sorted(late)]

    def samples(self) -> Iterator[tuple[Sample, Draft, int]]:
        """The original samples, as they are in this plan, with their drafts and how many samples those come to."""
        at = 0
        for draft in self.drafts:
            count = 1 + len(draft.tokens if isinstance(draft, DraftTree) else draft)
            yield self.plan.samples[at], draft, count
            at += count


class Speculation:
    """The known tokens of every slot, and the proposer that drafts after them."""

    def __init__(
        self,
        proposer: Proposer,
        verify: Verify = verify,
        *,
        hidden_layers: tuple[int, ...] | None = None,
        predicted_only: bool = False,
    ):
        """`hidden_layers`: after which layers the proposer needs hidden states, besides the last; None: it needs none,
        not even the last. `predicted_only`: nothing is drafted for sequences without a prediction."""
        self._proposer = proposer
        self.hidden_layers = hidden_layers
        self._contexts: dict[int, DraftContext] = {}
        self._verify = verify
        self._predicted_only = predicted_only

    def expand(self, plan: StepPlan) -> ExpandedPlan:
        """Follow the plan's changes of slots, ask for drafts, and lay them out as rows and samples."""
        self._apply(plan)
        drafts = self._propose(plan.rows)
        if not any(drafts):
            return ExpandedPlan.without_drafts(plan)
        rows: list[Row] = []
        row_index = []
        depths: list[range | list[int]] = []  # of each row and its draft tokens
        in_trees: dict[int, TreeRow] = {}
        writes = list(plan.writes)
        for row, draft in zip(plan.rows, drafts, strict=True):
            row_index.append(len(rows))
            end = row.start + row.count
            tokens = draft.tokens if isinstance(draft, DraftTree) else draft
            rows += [row, *(Row(row.slot, at, 1, shift=row.shift) for at in range(end, end + len(tokens)))]
            if tokens:
                writes.append(Write(row.slot, end, tokens))
            if isinstance(draft, DraftTree):
                added = tree_rows(draft, end)
                in_trees |= {row_index[-1] + 1 + i: tree_row for i, tree_row in enumerate(added)}
                depths.append([0, *(tree_row.depth + 1 for tree_row in added)])
            else:
                depths.append(range(len(draft) + 1))
        samples = [
            Sample(row_index[s.row] + i, s.slot, s.position + depth)
            for s in plan.samples
            for i, depth in enumerate(depths[s.row])
        ]
        expanded = replace(plan, rows=rows, samples=samples, writes=writes)
        return ExpandedPlan(expanded, [drafts[s.row] for s in plan.samples], in_trees, row_index)

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.frees:
            if context := self._contexts.pop(slot, None):
                self._proposer.forget(context)
        for admit in plan.admits:
            if admit.prediction or not self._predicted_only:
                self._contexts[admit.slot] = DraftContext(admit)
        for write in plan.writes:
            if (context := self._contexts.get(write.slot)) is None:
                continue
            tokens = context.tokens
            if tokens[write.start :] != write.tokens:  # chosen elsewhere, by beam search
                tokens[write.start :] = write.tokens

    def _propose(self, rows: list[Row]) -> list[Draft]:
        drafts: list[Draft] = [[] for _ in rows]
        drafted = [i for i, row in enumerate(rows) if row.drafts]
        if drafted:
            contexts = [self._contexts[rows[i].slot] for i in drafted]
            found = self._proposer.propose(contexts, [rows[i].drafts for i in drafted])
            for i, context, draft in zip(drafted, contexts, found, strict=True):
                chained = rows[i].shift or rows[i].states or _needs_one_history(context.admit.params)
                if isinstance(draft, DraftTree) and chained:
                    draft = draft.first_branch()
                drafts[i] = draft if isinstance(draft, DraftTree) else draft[: rows[i].drafts]
        return drafts

    def accept(self, draft: Draft, sampled: list[int]) -> tuple[list[int], list[int]]:
        """The accepted tokens, of those sampled along a draft, and the indices of their samples."""
        if isinstance(draft, DraftTree):
            indices = verify_tree(draft, sampled)
            return [sampled[i] for i in indices], indices
        accepted = self._verify(draft, sampled)
        return [*draft[:accepted], sampled[accepted]], list(range(accepted + 1))

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: Any = None) -> None:
        """These are the tokens of a slot from `position` on, sampled (but those forced) from these hidden states."""
        context = self._contexts.get(slot)
        if context is not None and len(context.tokens) == position:
            context.tokens += tokens
            context.hidden = hidden
            self._proposer.observe(context, tokens)
            context.hidden = None


def _needs_one_history(params: SamplingParams) -> bool:
    """Whether logits are processed by the tokens before them, or masked along a draft: then it must be a chain."""
    penalties = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1
    return bool(penalties or params.bad_words or params.bad_token_ids or params.grammar)
