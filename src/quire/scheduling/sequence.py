"""One branch of a request on its way through the engine: what it knows, and how far it has been computed.

This is the spine only. What a feature needs to remember of a sequence, it keeps itself, by sequence.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Protocol

from quire.memory.manager import Change, PageTable
from quire.types.policy import Expected, SequenceView
from quire.types.request import TRANSITIONS, Request, Status
from quire.types.timeline import Timeline

ANY = 1 << 30


class Sequence:
    """Tokens it knows, tokens it will know once steps in flight end, and KV it has.

    tokens    ├── prompt ──┼── outputs ──┤ · · ·  pending (drawn on the device, not yet read)
    computed  ├──────────────────────────┼──►     caught up when computed == len(tokens) + pending
    """

    __slots__ = (
        "attained", "branch", "cached", "computed", "draws", "epoch", "expected", "hook", "id", "inflight", "limit",
        "log", "max_pending", "overdue", "pending", "prompt_len", "rank", "request", "slot", "status",
        "steady_until", "stops", "table", "tokens", "unsent",
    )  # fmt: skip

    def __init__(
        self, request: Request, branch: int, *, id: int, limit: int, table: PageTable, late_draws: bool = False
    ):
        """`late_draws`: as of the executor's capacity."""
        self.request = request
        self.branch = branch
        self.id = id
        self.rank: tuple[Any, ...] = (id,)  # overdue, interactive or background; the policy's key; the id
        self.overdue = False  # it has waited so long that it goes before all others
        self.expected = Expected(limit - len(request.prompt), limit - len(request.prompt))
        self.prompt_len = len(request.prompt)
        self.limit = limit  # most tokens it may ever have, prompt included
        self.tokens = [*request.prompt, *request.outputs] if request.outputs else list(request.prompt)
        self.pending = 0
        self.steady_until = 0  # with fewer tokens it decodes: of its next draw there is nothing to say but the token
        self.unsent = 0  # tokens at the end that its slot does not have: they were not drawn there
        self.draws = not request.pooling  # whether tokens are drawn once all it knows is computed
        self.max_pending = ANY  # most draws that may be pending when its next row is planned
        if request.beam is not None:
            self.max_pending = 0  # which of them go on depends on what they draw
        elif request.params.grammar is not None:
            self.max_pending = int(late_draws)  # what its row may draw depends on the token before
        eos = [] if request.params.ignore_eos else request.eos_token_ids
        self.stops = [*eos, *request.params.stop_token_ids]  # tokens that end it
        self.computed = 0  # as of the last plan, drafts left out
        self.attained = 0  # token rows computed for it
        self.cached = -1  # prompt tokens found in the cache at first admission
        self.table = table
        self.hook: RowHook | None = None
        self.slot = -1
        self.epoch = 0  # grows when in-flight results become void: it lost its pages, or is over
        self.inflight = 0  # steps submitted that still use its slot and pages
        self.status = Status.WAITING
        self.log = Timeline(request=request.id, branch=branch, prompt=self.prompt_len, arrival=request.arrival)

    @property
    def key(self) -> str:
        return f"{self.request.id}/{self.branch}"

    @property
    def known(self) -> int:
        """Tokens it has or will have when the steps in flight end: an upper bound."""
        return len(self.tokens) + self.pending

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def regular(self) -> bool:
        """Whether its row is like any other's once it lacks one token: its slot has all others, and it draws."""
        return self.hook is None and self.draws and not self.unsent

    @property
    def evicted(self) -> int:
        """Of the tokens computed, those whose KV was evicted since."""
        return self.hook.evicted if self.hook is not None else 0

    @property
    def held(self) -> int:
        """KV entries it has, as of the last plan: the position its next token takes among them."""
        return self.computed - self.evicted

    @property
    def peak(self) -> int:
        """Most KV entries it may have at once."""
        return self.limit if self.hook is None else self.hook.peak

    @property
    def reusable(self) -> int:
        """How many of its tokens, less one, may come from a cache: none if every position must be computed."""
        if self.request.params.prompt_logprobs is not None or self.request.pooling == "mean":
            return 1
        return self.known if self.hook is None else min(self.known, self.hook.reach)

    @property
    def plain(self) -> bool:
        """Whether the KV of all its tokens is what these alone make of it, token by token."""
        return self.hook is None and self.request.blend is None

    @property
    def view(self) -> SequenceView:
        """What a policy may see of it."""
        return _View(self)

    def fork(self, id: int, table: PageTable) -> Sequence:
        """Another sequence with the same tokens, computed as far; `table` holds its pages."""
        child = Sequence(self.request, self.branch, id=id, limit=self.limit, table=table)
        child.rank = self.rank
        child.expected = self.expected
        child.tokens = list(self.tokens)
        child.computed = self.computed
        child.cached = self.cached
        child.log = self.log
        return child

    def move(self, status: Status) -> None:
        if status is not self.status:
            assert status in TRANSITIONS[self.status], f"{self.key}: {self.status} cannot become {status}"
            self.status = status


class RowHook(Protocol):
    """How a feature changes what the rows of one sequence are: how many tokens, which pages, what else is asked."""

    evicted: int  # tokens computed whose KV is gone
    peak: int  # most KV entries at once

    @property
    def reach(self) -> int:
        """How many tokens, less one, may come from a cache."""
        ...

    @property
    def sequential(self) -> bool:
        """Whether a row is planned only after the last one's results are in."""
        ...

    def row_limit(self, computed: int) -> int:
        """Most tokens of a row that begins there."""
        ...

    def extend(self, seq: Sequence, count: int, step: int) -> Change | None:
        """Pages for `count` more tokens; None if pages are lacking."""
        ...

    def wants_mass(self, start: int) -> bool:
        """Whether the row that begins there shall report the attention it pays."""
        ...

    def inherit(self, parent: RowHook) -> None:
        """Its sequence begins with the KV of another one."""
        ...

    def reset(self) -> None:
        """Its sequence lost its pages."""
        ...


class _View:
    """A read-only face of a sequence."""

    __slots__ = ("_seq",)

    def __init__(self, seq: Sequence):
        self._seq = seq

    id = property(attrgetter("_seq.id"))
    request = property(attrgetter("_seq.request.id"))
    tenant = property(attrgetter("_seq.request.tenant"))
    priority = property(attrgetter("_seq.request.priority"))
    arrival = property(attrgetter("_seq.request.arrival"))
    prompt = property(attrgetter("_seq.prompt_len"))
    cached = property(attrgetter("_seq.cached"))
    computed = property(attrgetter("_seq.held"))
    drawn = property(attrgetter("_seq.outputs"))
    attained = property(attrgetter("_seq.attained"))
    expected = property(attrgetter("_seq.expected"))
    ttft_target = property(attrgetter("_seq.request.slo_ttft"))
    tpot_target = property(attrgetter("_seq.request.slo_tpot"))
    weight = property(attrgetter("_seq.request.weight"))
    background = property(attrgetter("_seq.request.background"))

    @property
    def remaining(self) -> int:
        return max(0, self._seq.limit - len(self._seq.tokens))

    @property
    def pages(self) -> int:
        return sum(len(pages) for pages in self._seq.table.pages)
