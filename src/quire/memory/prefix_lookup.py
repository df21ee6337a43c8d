"""The longest cached prefix of a sequence: in full pages by their names, and on to the token by what pages hold.

Refuses to know: what becomes of a hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.memory.page_table import Hit, PageTable
from quire.memory.partial_pages import pack
from quire.memory.pool import PagePool
from quire.memory.state_cells import StateCells
from quire.types.kv import NULL_PAGE, NULL_STATE, KVLayout

Run = Callable[[int, Iterable[bytes]], list[int]]  # (group, names) → pages of the first of them, up to one not known


def must_copy(pool: PagePool, page: int, filled: int, refs: int) -> bool:
    """Whether a page must be copied by who writes behind its first `filled` tokens: more than `refs` refer to it, or
    more of it may be found."""
    return pool.refs(page) > refs or pool.index.filled(page) > filled


class PrefixLookup:
    def __init__(self, layout: KVLayout, pool: PagePool, states: StateCells | None):
        self._layout = layout
        self._pool = pool
        self._index = pool.index
        self._states = states
        self._sizes = [group.tokens_per_page for group in layout.groups]
        self._step = layout.alignment

    def lookup(self, table: PageTable, limit: int, tokens: Sequence[int] = ()) -> Hit:
        """The longest prefix of fewer than `limit` tokens that every group can serve.

        A full group needs every page of it; a window group only those its window still reaches; recurrent layers a
        snapshot behind it, and those are at page boundaries.
        """
        hit = self._lookup_pages(table, limit)
        if not tokens or hit.waits or self._states is not None:
            return hit
        return self._match_tokens(table, limit, tokens, hit)

    def matched(self, table: PageTable, limit: int) -> int:
        """How many of fewer than `limit` tokens every group can serve in full pages."""
        return self.longest(table, limit, self._run)[0]

    def _match_tokens(self, table: PageTable, limit: int, tokens: Sequence[int], hit: Hit) -> Hit:
        """What pages that begin like the next ones add to a hit."""
        partial, found = self._index.partial, []
        total = soon = limit - 1
        for group, size in enumerate(self._sizes):
            first = hit.tokens // size
            names = table.hashes[group][first : (limit - 1) // size]
            more = self._index.run(group, names) if len(self._sizes) > 1 else []  # which one group's hit ends at
            at = first + len(more)
            parent, wanted = (group, table.name_before(group, at)), pack(tokens[at * size : limit - 1][:size])
            length, page = partial.match(parent, wanted)
            found.append([*more, page] if length else more)
            total = min(total, at * size + length)
            soon = min(soon, at * size + max(length, partial.planned(parent, wanted)))
        total = self._copyable(total, hit.tokens, found)
        if total > hit.tokens:
            whole = hit
            added = [
                behind[: -(-total // size) - len(run)]
                for behind, run, size in zip(found, whole.pages, self._sizes, strict=True)
            ]
            pages = [[*run, *behind] for run, behind in zip(whole.pages, added, strict=True)]
            hit = Hit(total, pages, whole.idle + sum(map(self._pool.idle, added)), waits=False, shared=total)
            hit.rounded = whole
            ends = [(run[-1], total % size) for run, size in zip(pages, self._sizes, strict=True) if total % size]
            hit.copies = sum(must_copy(self._pool, page, filled, refs=0) for page, filled in ends)
        hit.soon = soon - hit.tokens
        return hit

    def _copyable(self, tokens: int, after: int, found: list[list[int]]) -> int:
        """Of so many tokens, those that do not end within a page that the plan in the making computes; `found`: pages
        by group, behind the first `after` tokens."""
        for group, size in enumerate(self._sizes):
            at = tokens // size - after // size
            if tokens % size and self._index.partial.is_planned(found[group][at]):
                return self._copyable(tokens // size * size, after, found)
        return tokens

    def _lookup_pages(self, table: PageTable, limit: int) -> Hit:
        tokens, pages = self.longest(table, limit, self._run)
        shared, state = tokens, NULL_STATE
        if self._states is not None:
            shared = self._reach(table, limit, self._run)[0]
            if tokens:
                (state,) = self._run(self._states.group, table.hashes[0][tokens // self._sizes[0] - 1 :][:1])
        waits = self._promised_after(table, tokens, shared, limit)
        if not tokens:
            return Hit(0, [[] for _ in self._sizes], 0, waits, shared)
        return Hit(tokens, pages, sum(self._pool.idle(found) for found in pages), waits, shared, state)

    def _run(self, group: int, names: Iterable[bytes]) -> list[int]:
        """Pages, or cells, of consecutive names, up to the first that is not held."""
        return (self._index if self._states is None or group != self._states.group else self._states.index).run(
            group, names
        )

    def longest(self, table: PageTable, limit: int, run: Run) -> tuple[int, list[list[int]]]:
        """The longest prefix of fewer than `limit` tokens whose pages `run` knows, and those pages by group."""
        tokens, runs = self._reach(table, limit, run)
        while (tokens := self._deepest_state(table, tokens, run)) > 0:
            pages = [
                runs[group][: tokens // size] if group in runs else self._window_pages(group, table, tokens, run)
                for group, size in enumerate(self._sizes)
            ]
            if all(found is not None for found in pages):
                return tokens, [found for found in pages if found is not None]
            tokens -= self._step
        return 0, []

    def _deepest_state(self, table: PageTable, tokens: int, run: Run) -> int:
        """Of the first `tokens` tokens, those that a snapshot serves too, where recurrent layers need one."""
        states, size = self._states, self._sizes[0]
        if states is None:
            return tokens
        if run == self._run:
            return states.deepest(table.hashes[0], tokens)
        while tokens > 0 and not run(states.group, table.hashes[0][tokens // size - 1 : tokens // size]):
            tokens -= self._step
        return tokens

    def _reach(self, table: PageTable, limit: int, run: Run) -> tuple[int, dict[int, list[int]]]:
        """How many of fewer than `limit` tokens the pages of full groups serve, and those pages, from the start."""
        step = self._step
        tokens = (limit - 1) // step * step
        runs: dict[int, list[int]] = {}
        for group, spec in enumerate(self._layout.groups):
            if spec.window is None:
                size = self._sizes[group]
                runs[group] = run(group, table.hashes[group][: tokens // size])
                tokens = min(tokens, len(runs[group]) * size // step * step)
        return tokens, runs

    def _window_pages(self, group: int, table: PageTable, tokens: int, run: Run) -> list[int] | None:
        """Pages of the prefix as the next token sees them, or None if one it needs is missing."""
        size, window = self._sizes[group], self._layout.groups[group].window
        assert window is not None
        first = max(0, tokens - window + 1) // size
        pages = run(group, table.hashes[group][first : tokens // size])
        return [NULL_PAGE] * first + pages if first + len(pages) == tokens // size else None

    def _promised_after(self, table: PageTable, tokens: int, shared: int, limit: int) -> bool:
        """Whether another request is about to compute the page that follows the `shared` tokens that pages serve, or a
        snapshot further on than a hit of `tokens`."""
        if self._states is not None and self._states.promised(table.hashes[0], tokens, limit):
            return True
        for group, size in enumerate(self._sizes):
            after = shared // size
            if after < len(table.hashes[group]) and (after + 1) * size < limit:
                key = (group, table.hashes[group][after])
                if self._index.promiser(key) is not None:
                    return True
        return False
