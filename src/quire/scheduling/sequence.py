"""One branch of a request on its way through the engine: what it knows, and how far it has been computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.memory.manager import PageTable
from quire.types.plan import TokenLogprobs
from quire.types.request import TRANSITIONS, Request, Status
from quire.types.timeline import Timeline

if TYPE_CHECKING:
    from quire.scheduling.features.draft_budgets import AcceptanceRate
    from quire.scheduling.features.kv_eviction import KVBudget


class Sequence:
    """Tokens it knows, tokens it will know once steps in flight end, and KV it has.

    tokens    ├── prompt ──┼── outputs ──┤ · · ·  pending (drawn on the device, not yet read)
    computed  ├──────────────────────────┼──►     caught up when computed == len(tokens) + pending
    """

    __slots__ = (
        "acceptance",
        "arrival",
        "branch",
        "cached",
        "children",
        "computed",
        "drafts",
        "draws",
        "epoch",
        "evicted",
        "hit",
        "inflight",
        "key",
        "kv_budget",
        "limit",
        "log",
        "lost",
        "order",
        "peak",
        "pending",
        "pooled",
        "preempted",
        "priority",
        "prompt_len",
        "reach",
        "request",
        "rows",
        "scores",
        "slot",
        "status",
        "stepwise",
        "table",
        "tokens",
        "unsent",
        "waits_since",
    )  # fmt: skip

    def __init__(self, request: Request, branch: int, *, order: int, limit: int, table: PageTable):
        self.request = request
        self.branch = branch
        self.key = f"{request.id}/{branch}"
        self.arrival = request.arrival
        self.priority = request.priority
        self.order = order
        self.prompt_len = len(request.prompt)
        self.limit = limit  # most tokens it may ever have, prompt included
        self.tokens = list(request.prompt)
        self.pending = 0
        self.unsent = 0  # tokens at the end that its slot does not have: they were not drawn there
        # Whether what it computes next depends on the token drawn last.
        self.stepwise = request.params.grammar is not None or request.beam is not None
        self.draws = not request.pooling  # whether tokens are drawn once all it knows is computed
        self.drafts = 0  # tokens that its latest row may guess
        self.computed = 0  # as of the last plan, guesses left out
        self.evicted = 0  # of them, those whose KV was forgotten since
        self.hit = 0  # of them, found in the cache at its last start
        self.cached = -1  # prompt tokens found in the cache at first admission
        self.table = table
        self.slot = -1
        self.epoch = 0  # grows when in-flight results become void
        self.preempted = 0  # how often it lost its pages
        self.inflight = 0  # steps submitted that still use its slot and pages
        self.status = Status.WAITING
        self.children: list[Sequence] = []  # branches to fork off once the prompt is computed
        self.scores: list[TokenLogprobs] = []  # prompt log-probabilities so far
        self.pooled: list[float] = []  # sum of hidden states so far, if they are asked for
        self.kv_budget: KVBudget | None = None  # what it may hold, if that is less than all
        self.peak = limit  # KV entries it may have at once, and until then it forgets nothing
        self.reach = limit  # how many tokens, less one, may come from a cache
        self.acceptance: AcceptanceRate | None = None  # how guesses of its tokens have done
        self.log: Timeline  # these four are the timeline's
        self.rows = 0  # token rows computed for it that were not in vain
        self.lost = 0  # KV entries it had when it was preempted
        self.waits_since = 0.0

    @property
    def known(self) -> int:
        """Tokens it has or will have when the steps in flight end: an upper bound."""
        return len(self.tokens) + self.pending

    @property
    def held(self) -> int:
        """KV entries it has, as of the last plan: the position its next token takes among them."""
        return self.computed - self.evicted

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    def fork(self, table: PageTable) -> Sequence:
        """Another sequence with the same tokens, computed as far; `table` holds its pages."""
        child = Sequence(self.request, self.branch, order=self.order, limit=self.limit, table=table)
        child.tokens = list(self.tokens)
        child.computed = child.hit = self.computed
        child.cached = self.cached
        child.log = self.log
        return child

    def budgeted(self, kv_budget: KVBudget) -> None:
        """It may hold no more than that."""
        self.kv_budget, self.peak, self.reach = kv_budget, kv_budget.peak, kv_budget.reach

    def inherit(self, parent: Sequence) -> None:
        """It begins with the KV of its parent, and so without what that has forgotten."""
        self.evicted = parent.evicted
        if self.kv_budget is not None and parent.kv_budget is not None:
            self.kv_budget.scores = list(parent.kv_budget.scores)

    def move(self, status: Status) -> None:
        if status is not self.status:
            assert status in TRANSITIONS[self.status], f"{self.key}: {self.status} cannot become {status}"
            self.status = status
