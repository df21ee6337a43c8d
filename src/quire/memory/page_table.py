"""What is known of one sequence's KV: its page table, the prefix it started from, and what `extend` changed.

Refuses to know: which pages there are.
"""

from __future__ import annotations

from quire.memory.prefix import Key
from quire.memory.state_cells import StateTrack
from quire.types.kv import NULL_STATE
from quire.types.plan import RopeShift

UNLIMITED = 1 << 62


class PageTable:
    """The pages of one sequence; `hashes` names its full pages as far as its tokens are known.

    Of its first `named_until` tokens, pages hold what their names say; behind them, whatever is there is not named.
    A step that stays inside its pages skips all work: up to `writable_until` tokens may be written as things are, and
    before `next_publish` tokens are computed there is nothing new to publish.
    """

    __slots__ = (
        "hashes",
        "named_until",
        "next_publish",
        "owner",
        "pages",
        "promises",
        "published",
        "roots",
        "shared",
        "state",
        "writable_until",
        "written_through",
    )  # fmt: skip

    def __init__(self, groups: int, owner: str = ""):
        self.owner = owner  # the request it belongs to
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.hashes: list[list[bytes]] = [[] for _ in range(groups)]
        self.roots: list[bytes] = []  # what the first page of each group comes after, by salt
        self.published = [0] * groups  # pages of each group entered into the index by this sequence
        self.written_through = [0] * groups  # ... and computed, so that tiers have them
        self.promises: list[Key] = []
        self.named_until = UNLIMITED
        self.state = StateTrack()
        self.shared = 0  # tokens that pages of others reached when it started
        self.writable_until = 0
        self.next_publish = 0

    def name_before(self, group: int, index: int) -> bytes:
        """What the page at `index` comes after."""
        return self.hashes[group][index - 1] if index else self.roots[group]


class Hit:
    """A prefix found in the index: `tokens` of it, in these pages; `waits` if more is being computed. Where it ends
    within a page, whoever starts from it copies that page, unless nobody holds it and it ends there too."""

    __slots__ = ("copies", "idle", "pages", "rounded", "shared", "soon", "state", "tokens", "waits")

    def __init__(
        self, tokens: int, pages: list[list[int]], idle: int, waits: bool, shared: int = 0, state: int = NULL_STATE
    ):
        self.tokens = tokens
        self.pages = pages
        self.idle = idle  # pages of it that are unreferenced now: reviving them uses up availability
        self.waits = waits
        self.shared = shared  # tokens that pages alone would serve, without the states of recurrent layers
        self.state = state  # the cell of its snapshot
        self.copies = 0  # pages to copy
        self.rounded: Hit | None = None  # the same in full pages, if this ends within one
        self.soon = 0  # tokens more that could be copied once the plan in the making has run

    @classmethod
    def none(cls, groups: int) -> Hit:
        return cls(0, [[] for _ in range(groups)], 0, waits=False)


class Change:
    """What `extend` did to one table."""

    __slots__ = ("copies", "deltas", "rope_shifts")

    def __init__(self) -> None:
        self.deltas: list[tuple[int, int, list[int]]] = []  # (group, index, pages)
        self.copies: list[tuple[int, int]] = []
        self.rope_shifts: list[RopeShift] = []


UNCHANGED = Change()
