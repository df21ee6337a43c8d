"""Why a prefix hit, or did not, and what the pages look like now: answers for people, asked once a request or a second.

Knows: the manager's tables and index. Refuses to know: requests; token ids only to name the first page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from quire.memory.manager import Hit, KVManager, PageTable
from quire.memory.prefix import Eviction
from quire.memory.tiers import Directory
from quire.types.kv import NULL_PAGE
from quire.types.timeline import PrefixOutcome
from quire.types.view import BLANK, CACHED, OWNED, SHARED, PrefixNode, TierPages

MAX_CELLS = 4096
MAX_NODES = 200
MAX_PAGES = 8192  # pages of which the prefix tree is drawn
MAX_KNOWN_SALTS = 4096  # first pages remembered with their salt


class PrefixExplainer:
    """Remembers whose salt the tokens of each first page were last asked under, which the salted names cannot tell."""

    def __init__(self, memory: KVManager):
        self._memory = memory
        self._size = memory.layout.groups[0].tokens_per_page
        self._salts: OrderedDict[tuple[int, ...], str] = OrderedDict()

    def outcome(
        self, table: PageTable, hit: Hit, tokens: Sequence[int], salt: str, scored: bool, reach: int
    ) -> PrefixOutcome:
        """Why `hit`, and no more, was found for a prompt."""
        memory, step = self._memory, self._memory.layout.alignment
        if not memory.prefix_cache:
            return PrefixOutcome.OFF
        other = self._asked_under(tokens, salt)
        if scored:
            return PrefixOutcome.SCORED
        if hit.tokens >= max(1, (len(tokens) - 1) // step * step):
            return PrefixOutcome.FULL
        if len(tokens) <= step:
            return PrefixOutcome.SHORT
        if hit.tokens + step >= reach:
            return PrefixOutcome.BUDGET
        if hit.shared > hit.tokens:
            return PrefixOutcome.STATE
        name = table.hashes[0][hit.tokens // self._size]
        if memory.index.run(0, [name]):
            return PrefixOutcome.WINDOW
        if self.eviction(table, hit) is not None:
            return PrefixOutcome.EVICTED
        if hit.tokens == 0 and other not in (None, salt):
            return PrefixOutcome.SALT
        return PrefixOutcome.NEW

    def eviction(self, table: PageTable, hit: Hit) -> Eviction | None:
        """What became of the page after the hit, if it was here."""
        return self._memory.index.evicted((0, table.hashes[0][hit.tokens // self._size]))

    def _asked_under(self, tokens: Sequence[int], salt: str) -> str | None:
        """The salt under which these first tokens were last asked, from now on `salt`."""
        if len(tokens) < self._size:
            return None
        first = tuple(tokens[: self._size])
        before = self._salts.pop(first, None)
        self._salts[first] = salt
        if len(self._salts) > MAX_KNOWN_SALTS:
            self._salts.popitem(last=False)
        return before


def page_map(memory: KVManager, owners: Iterable[PageTable]) -> TierPages:
    """What every page of the pool holds; large pools in cells of several pages, each showing its busiest."""
    pool = memory.pool
    codes = [CACHED if memory.index.knows(page) else BLANK for page in range(pool.total + 1)]
    for number, table in enumerate(owners):
        for pages in table.pages:
            for page in pages:
                if page != NULL_PAGE:
                    codes[page] = SHARED if pool.refs(page) > 1 else OWNED + number
    del codes[NULL_PAGE]
    per_cell = -(-len(codes) // MAX_CELLS)
    cells = codes if per_cell == 1 else [max(codes[i : i + per_cell]) for i in range(0, len(codes), per_cell)]
    return TierPages("device", pool.total, pool.used, pool.cached, per_cell, cells)


def tier_maps(directory: Directory) -> list[TierPages]:
    """How full the tiers below the device are."""
    maps = []
    for tier in directory.tiers:
        held = len(tier.holds)
        total = max(tier.spec.pages or held, 1)
        per_cell = -(-total // MAX_CELLS)
        full = -(-held // per_cell)
        cells = [CACHED] * full + [BLANK] * (-(-total // per_cell) - full)
        maps.append(TierPages(tier.name, total, 0, held, per_cell, cells))
    return maps


def prefix_tree(memory: KVManager) -> list[PrefixNode]:
    """The prefixes in the cache: runs of pages, breadth first, the largest families first."""
    pages: dict[bytes, int] = {}
    children: dict[bytes, list[bytes]] = {}
    for name, parent, page in islice(memory.index.entries(0), MAX_PAGES):
        pages[name] = page
        children.setdefault(parent, []).append(name)
    roots = [name for parent, names in children.items() if parent not in pages for name in names]
    sizes = _subtree_sizes(roots, children)
    nodes: list[PrefixNode] = []
    level = [(-1, name) for name in roots]
    while level and len(nodes) < MAX_NODES:
        level.sort(key=lambda item: -sizes[item[1]])
        following: list[tuple[int, bytes]] = []
        for above, name in level[: MAX_NODES - len(nodes)]:
            run = [name]
            more = children.get(name, [])
            while len(more) == 1:
                run.append(more[0])
                more = children.get(run[-1], [])
            used = sum(memory.pool.refs(pages[member]) > 0 for member in run)
            nodes.append(PrefixNode(above, len(run), used, len(more)))
            following += [(len(nodes) - 1, child) for child in more]
        level = following
    return nodes


def _subtree_sizes(roots: list[bytes], children: Mapping[bytes, list[bytes]]) -> dict[bytes, int]:
    order = list(roots)
    for name in order:
        order += children.get(name, ())
    sizes: dict[bytes, int] = {}
    for name in reversed(order):
        sizes[name] = 1 + sum(sizes[child] for child in children.get(name, ()))
    return sizes
