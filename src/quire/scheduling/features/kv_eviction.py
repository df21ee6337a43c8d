"""KV eviction: which pages of a context longer than its KV budget to evict, and when.

A request may have a budget of KV entries. When its next token would exceed it, pages are dropped until three quarters
of the budget are left (rarely and many, because the keys of pages that move together are rotated every time):

    sinks    the first page and the latest ones stay (StreamingLLM): needs to know nothing of what is attended to
    snapkv   the latest pages and those that the tokens of an observation window attended to most (SnapKV at the end
             of a prompt, TOVA after it)
    h2o      the latest pages and those with most attention since they were written, half and half (H2O)

Those that look at attention compute a prompt whole, if the model can attend to it, and evict at its end; otherwise,
and wherever prompt log-probabilities are wanted, the budget holds from the first token. Everything is decided at points
that depend on token counts alone, never on how a step was cut or what else was running: the same request evicts
the same.

Refuses to know: where pages lie, how attention is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Series
from typing import Protocol

from quire.memory.compaction import compact
from quire.memory.manager import Change, KVManager, PageTable
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import RowHook, Sequence
from quire.types.errors import InputError
from quire.types.plan import Capacity, StepResult
from quire.types.request import Request

OBSERVATION_WINDOW = 8  # latest tokens whose attention decides; with more, a question drowns in the text before it
KEPT_SHARE = 0.75  # of the budget, when it evicts


class EvictionPolicy(Protocol):
    """`window`: of the tokens before a decision, how many attention is asked of; 0: none, None: all."""

    window: int | None

    def keep(self, scores: Series[float], room: int) -> list[int]:
        """Which of the pages, one score each, to keep: `room` of them, ascending; the last is always among them."""
        ...


class Sinks:
    window: int | None = 0

    def keep(self, scores: Series[float], room: int) -> list[int]:
        return [0, *range(len(scores) - room + 1, len(scores))]


class Scored:
    """Some of the latest pages, and of the others those with the highest scores."""

    def __init__(self, window: int | None, latest: float):
        self.window = window
        self._latest = latest  # part of what is kept

    def keep(self, scores: Series[float], room: int) -> list[int]:
        recent = max(1, int(room * self._latest))
        older = range(len(scores) - recent)
        best = sorted(older, key=lambda page: (-scores[page], page))[: room - recent]
        return [*sorted(best), *range(len(scores) - recent, len(scores))]


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "sinks": Sinks(),
    "snapkv": Scored(OBSERVATION_WINDOW, 0.25),
    "h2o": Scored(None, 0.5),
}


class KVBudget:
    """What one sequence may hold, and what it has been attending to: the hook by which its rows keep to that."""

    __slots__ = ("_eviction", "budget", "evicted", "owed", "peak", "policy", "scores", "size")

    def __init__(self, eviction: KVEviction, policy: EvictionPolicy, budget: int, peak: int, size: int):
        self._eviction = eviction
        self.policy = policy
        self.budget = budget  # KV entries, in whole pages
        self.peak = peak  # KV entries at which it first evicts
        self.size = size  # tokens of a page
        self.reset()

    def reset(self) -> None:
        self.evicted = 0  # tokens computed whose KV is gone
        self.scores: list[float] = []  # attention paid to each page it has, as far as it was asked for
        self.owed: Change | None = None  # what was evicted, but not yet told to the worker
        self._eviction.forget(self)

    @property
    def reach(self) -> int:
        """How many tokens, less one, may come from a cache: those whose attention counts are computed."""
        window = self.policy.window
        return 1 if window is None else max(1, self.peak - window + (window > 0))

    @property
    def sequential(self) -> bool:
        """Whether it must have seen a step's attention before the next is planned."""
        return self.policy.window != 0

    @property
    def left(self) -> int:
        """Pages that stay when it evicts."""
        return int(self.budget // self.size * KEPT_SHARE)

    def next_eviction(self, computed: int) -> int:
        """Tokens computed when it must evict next, if it does so now where it must."""
        point = self.evicted + self.budget if self.evicted else self.peak
        if computed < point:
            return point
        return self.evicted + (-(-(computed - self.evicted) // self.size) - self.left) * self.size + self.budget

    def full(self, computed: int) -> bool:
        return computed >= (self.evicted + self.budget if self.evicted else self.peak)

    def row_limit(self, computed: int) -> int:
        """How many tokens may be computed together, so that decisions fall where they must and attention is measured
        from where it counts."""
        point, window = self.next_eviction(computed), self.policy.window
        if window and computed < point - window:
            point -= window
        return point - computed

    def wants_mass(self, start: int) -> bool:
        """Whether attention paid by the tokens from there on counts."""
        window = self.policy.window
        return window is None or (window > 0 and start >= self.next_eviction(start) - window)

    def extend(self, seq: Sequence, count: int, step: int) -> Change | None:
        return self._eviction.extend(seq, self, count, step)

    def inherit(self, parent: RowHook) -> None:
        if isinstance(parent, KVBudget):
            self.evicted, self.scores = parent.evicted, list(parent.scores)

    def learn(self, mass: Series[float]) -> None:
        self.scores += [0.0] * (len(mass) - len(self.scores))
        for page, paid in enumerate(mass):
            self.scores[page] += paid

    def choose(self, pages: int) -> list[int]:
        """Which of so many pages to keep; scores follow them, where they are not counted anew."""
        scores = self.scores + [0.0] * (pages - len(self.scores))
        kept = self.policy.keep(scores, self.left)
        self.scores = [scores[page] for page in kept] if self.policy.window is None else []
        return kept


class KVEviction(SchedulingFeature):
    def __init__(self, memory: KVManager, capacity: Capacity, timeline: TimelineRecorder):
        self._memory = memory
        self._longest = capacity.longest
        self._timeline = timeline
        self._size = memory.layout.groups[0].tokens_per_page
        self._refusal = ""
        if len(memory.layout.groups) > 1 or memory.layout.groups[0].window is not None:
            self._refusal = "this model's sliding windows evict by themselves"
        elif memory.layout.states:
            self._refusal = "this model has recurrent layers, which remember what their states hold, not pages"
        elif memory.layout.ranks > 1:
            self._refusal = "context-parallel ranks divide its pages, and what is kept cannot move together"
        elif not capacity.rope_shifts:
            self._refusal = "this model learned its positions one by one, so what it keeps cannot move together"
        elif memory.contiguous:
            self._refusal = "static batching sets all memory aside in advance"
        self._leaving: deque[tuple[int, list[int]]] = deque()  # (step that may still use them, pages no table holds)
        self._unread: dict[KVBudget, list[int]] = {}  # pages that what is owed will read; nobody may change them yet

    def budget(self, request: Request) -> KVBudget | None:
        """For a request with a budget; refuses, with a reason, one that cannot be kept."""
        params, length = request.params, len(request.prompt)
        if params.kv_budget is None:
            return None
        if self._refusal:
            raise InputError(f"kv_budget cannot be used here: {self._refusal}", param="kv_budget")
        params.check_budget(self._size, self._longest)
        policy, budget = EVICTION_POLICIES[params.kv_eviction], params.kv_budget // self._size * self._size
        whole = policy.window != 0 and params.prompt_logprobs is None and length <= self._longest
        fits = self._memory.layout.pages_for(length) <= self._memory.pool.total
        return KVBudget(self, policy, budget, max(length, budget) if whole and fits else budget, self._size)

    def arrived(self, seq: Sequence) -> None:
        seq.hook = self.budget(seq.request)

    def extend(self, seq: Sequence, budget: KVBudget, count: int, step: int) -> Change | None:
        """Pages for `count` more tokens, evicting first what must go; None if pages are lacking."""
        if budget.full(seq.computed) and not self._evict(seq, budget, step):
            return None
        extended = self._memory.extend(seq.table, seq.held, seq.held + count)
        if extended is None or budget.owed is None:
            return extended
        change, budget.owed = budget.owed, None
        self._let_go(self._unread.pop(budget, []), step)
        change.deltas += extended.deltas
        change.copies += extended.copies
        return change

    def _evict(self, seq: Sequence, budget: KVBudget, step: int) -> bool:
        pages = len(seq.table.pages[0])
        scores = budget.scores
        done = compact(self._memory, seq.table, budget.choose(pages))
        if done is None:
            budget.scores = scores
            return False
        budget.owed, dropped, read = done
        self._let_go(dropped, step if seq.inflight else 0)
        self._unread[budget] = read
        tokens = (pages - budget.left) * self._size
        budget.evicted += tokens
        self._timeline.evicted(seq, tokens)
        return True

    def forget(self, budget: KVBudget) -> None:
        """Its sequence begins again or is over: nothing is owed."""
        self._let_go(self._unread.pop(budget, []), 0)

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        """Pages that it still read go back; branches that set out from a row have attended to the same as it."""
        self.release_until(step.plan.step)
        if not result.mass:
            return
        told = [(i, *whose) for i, whose in enumerate(step.rows)]
        drawn = zip(step.plan.samples, step.samples, strict=True)
        told += [(s.row, *whose) for s, whose in drawn if whose[0] is not step.rows[s.row][0]]
        for row, seq, epoch in told:
            if row in result.mass and seq.epoch == epoch and isinstance(seq.hook, KVBudget):
                seq.hook.learn(result.mass[row])

    def _let_go(self, pages: list[int], step: int) -> None:
        """Give pages back once this step is over; 0: now."""
        if pages and step:
            self._leaving.append((step, pages))
        elif pages:
            self._memory.give_back(pages, self._size)

    def release_until(self, step: int) -> None:
        """All steps up to this one are over: nothing reads what they read any more."""
        while self._leaving and self._leaving[0][0] <= step:
            self._memory.give_back(self._leaving.popleft()[1], self._size)

    @property
    def returning(self) -> bool:
        """Whether pages come back when steps in flight end."""
        return bool(self._leaving)

    def tables(self) -> list[PageTable]:
        held = [*(pages for _, pages in self._leaving), *self._unread.values()]
        found = [PageTable(1) for _ in held]
        for table, pages in zip(found, held, strict=True):
            table.pages = [pages]
        return found
