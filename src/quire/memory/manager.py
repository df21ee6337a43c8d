"""Page tables of sequences over one pool, in every KV group of the model.

A table maps KV positions to pages, one list per group:

    tokens      0 ........ 15 | 16 ....... 31 | 32 .. 40
    group 0   [    page 7     |    page 3     |  page 9 ]     full pages may be shared and named by content
                                                 └ partly filled: written only while referenced once

`extend` makes positions writable and reports what changed, so that a plan can carry deltas only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import mul

from quire.memory.cache_events import CacheEventRecorder, PageListener
from quire.memory.page_table import UNCHANGED, UNLIMITED, Change, Hit, PageTable
from quire.memory.partial_pages import pack
from quire.memory.pool import ContiguousPool, PagePool
from quire.memory.prefix import Key, PrefixIndex
from quire.memory.prefix_lookup import PrefixLookup, Run, must_copy
from quire.memory.state_cells import StateCells
from quire.types.clock import Clock
from quire.types.hashing import PageHasher, new_key
from quire.types.kv import NULL_PAGE, KVLayout


class KVManager:
    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        *,
        prefix_cache: bool = True,
        contiguous: bool = False,
        states: int = 0,  # cells for states of recurrent layers, the null cell among them
        working: int = 0,  # of them, those that snapshots leave alone
        snapshot_tokens: int = 0,
        naming: bytes = b"",  # key of page names, where others must come to the same names
        clock: Clock | None = None,
    ):
        self.layout = layout
        self.prefix_cache = prefix_cache
        self.contiguous = contiguous
        self.index = PrefixIndex(clock)
        self.pool = (ContiguousPool if contiguous else PagePool)(pages, self.index)
        self._copied: list[list[int]] = [[]]  # pages that steps in flight, and the next one, copy
        self._loading: dict[Hashable, list[Key]] = {}  # promised by loads under way
        self.slots_allocated = 0  # token slots of pages given back, and how many of them were filled
        self.slots_filled = 0
        self._sizes = [g.tokens_per_page for g in layout.groups]
        self._step = layout.alignment
        self._first_cell = pages  # cells are made of pages behind those of tokens
        self.states: StateCells | None = None
        if layout.states:
            self.states = StateCells(
                states,
                working=working,
                group=len(layout.groups),
                step=self._step,
                size=self._sizes[0],
                interval=snapshot_tokens,
                snapshots=prefix_cache,
                clock=clock,
            )
        self._prefixes = PrefixLookup(layout, self.pool, self.states)
        key = naming or new_key()
        self._hashers = [PageHasher(key, size) for size in self._sizes]

    # ---- prefixes -------------------------------------------------------------------------------------------

    def name_pages_by(self, namer: Callable[[int], PageHasher]) -> None:
        """Have pages named otherwise, given their size; before there are any."""
        self._hashers = [namer(size) for size in self._sizes]

    def record_events(self, block_tokens: int) -> CacheEventRecorder:
        """Have changes of the prefix index recorded, by blocks of so many tokens (at least a page)."""
        recorder = CacheEventRecorder(max(1, block_tokens // self._sizes[0]))
        self.index.listeners.append(recorder)
        return recorder

    def tell_of_pages(self, listener: PageListener) -> None:
        """Have it hear of all pages that the prefix index holds from now on."""
        self.index.listeners.append(listener)

    def hash_pages(self, table: PageTable, tokens: Sequence[int], salt: str) -> None:
        """Name all full pages of `tokens`, continuing from those already named."""
        if not self.prefix_cache:
            return
        if not table.roots:
            table.roots = [hasher.root(salt) for hasher in self._hashers]
        for group, hasher in enumerate(self._hashers):
            hashes = table.hashes[group]
            if (len(hashes) + 1) * self._sizes[group] <= len(tokens):
                hashes.extend(hasher.chain(table.name_before(group, len(hashes)), tokens, first=len(hashes)))

    def lookup(self, table: PageTable, limit: int, tokens: Sequence[int] = ()) -> Hit:
        """The longest prefix of fewer than `limit` tokens that every group can serve: in full pages or, given the
        `tokens`, to the token."""
        return self._prefixes.lookup(table, limit, tokens) if self.prefix_cache else Hit.none(len(self._sizes))

    def matched(self, table: PageTable, limit: int) -> int:
        """How many of fewer than `limit` tokens full pages serve."""
        return self._prefixes.matched(table, limit) if self.prefix_cache else 0

    def longest(self, table: PageTable, limit: int, run: Run) -> tuple[int, list[list[int]]]:
        """The longest prefix of fewer than `limit` tokens whose pages `run` knows, and those pages by group."""
        return self._prefixes.longest(table, limit, run)

    def promise(self, table: PageTable, upto: int) -> None:
        """Say that the holder of `table` will compute the full pages of its first `upto` tokens that it has not, the
        next of which may be partly filled."""
        keys = (
            (group, name)
            for group, size in enumerate(self._sizes)
            for name in table.hashes[group][table.published[group] : upto // size]
        )
        table.promises = self.index.promise(keys, table)

    def want_snapshots(self, table: PageTable, upto: int) -> None:
        """Have states of recurrent layers kept on the way to the first `upto` tokens."""
        if self.states is not None:
            self.states.want(table.state, table.state.since, table.shared, upto, table.hashes[0])

    def publish_states(self, table: PageTable, upto: int, tokens: Sequence[int], salt: str) -> None:
        """Steps that have landed computed the states of the first `upto` of `tokens`: name the snapshots among them."""
        if self.states is not None and table.state.kept:
            self.hash_pages(table, tokens, salt)
            self.states.publish(table.state, upto, table.hashes[0])

    def publish(self, table: PageTable, upto: int, tokens: Sequence[int], salt: str) -> None:
        """The first `upto` of `tokens` are (or will be, before anyone attends) computed: enter their full pages."""
        upto = min(upto, table.named_until)
        if upto < table.next_publish or not self.prefix_cache:
            return
        self.hash_pages(table, tokens, salt)
        for group, size in enumerate(self._sizes):
            first, last = table.published[group], min(upto // size, len(table.hashes[group]))
            if last > first:
                names, pages = table.hashes[group][first:last], table.pages[group][first:last]
                content = pack(tokens[first * size : last * size])
                self.index.publish_run(group, names, pages, table.name_before(group, first), content)
                table.published[group] = last
        table.next_publish = min(map(mul, [n + 1 for n in table.published], self._sizes))

    def publish_tail(self, table: PageTable, upto: int, tokens: Sequence[int], salt: str) -> None:
        """As `publish`, with the page that the first `upto` of `tokens` fill in part."""
        self.publish(table, upto, tokens, salt)
        if not self.prefix_cache or self.states is not None or upto > table.named_until:
            return
        for group, size in enumerate(self._sizes):
            at, pages = upto // size, table.pages[group]
            if upto % size and at < len(pages) and table.published[group] == at and not self.index.key_of(pages[at]):
                parent = (group, table.name_before(group, at))
                self.index.publish_tail(parent, pages[at], pack(tokens[at * size : upto]))

    # ---- pages ----------------------------------------------------------------------------------------------

    def plan_begins(self) -> None:
        """What was published before may be copied from now on."""
        self.index.partial.settle()

    def launched(self) -> None:
        """A plan with the copies and rows since the last one goes its way."""
        self._copied.append([])
        if self.states is not None:
            self.states.launched()

    def landed(self) -> None:
        """The oldest of those steps is over: pages that it copied may go."""
        if copied := self._copied.pop(0):
            self.pool.release(copied)
        if self.states is not None:
            self.states.landed()

    @property
    def returning(self) -> bool:
        """Whether pages come back when steps in flight end."""
        return any(self._copied)

    def fits(self, tokens: int, hit: Hit, spare: int, without: Sequence[PageTable] = ()) -> bool:
        """Whether a sequence of `tokens` tokens that starts with `hit` leaves `spare` pages free, once the tables
        `without` are released."""
        held = sum(len(pages) - pages.count(NULL_PAGE) for pages in hit.pages) - hit.copies
        freed = self._freed(without, hit) if without else 0
        return self.layout.pages_for(tokens) - held + hit.idle + spare <= self.pool.available + freed

    def _freed(self, tables: Sequence[PageTable], hit: Hit) -> int:
        """Pages that only these tables refer to, beside those of a hit."""
        shared = Counter(page for table in tables for pages in table.pages for page in pages)
        found = {page for pages in hit.pages for page in pages}
        return sum(self.pool.refs(page) == refs for page, refs in shared.items() if page not in found)

    def adopt(self, table: PageTable, hit: Hit) -> None:
        """Start a table with the pages of a hit."""
        table.shared = hit.shared
        if self.states is not None:
            self.states.adopt(table.state, hit.state, hit.tokens)
        for group, pages in enumerate(hit.pages):
            self.pool.share(pages)
            table.pages[group] = list(pages)
            table.published[group] = hit.tokens // self._sizes[group]

    def extend(self, table: PageTable, start: int, end: int) -> Change | None:
        """Make positions start .. end - 1 writable; None if pages are lacking, which changes nothing that a query from
        `start` on sees."""
        if end <= table.writable_until:
            return UNCHANGED
        need = 0
        shared: list[int] = []  # groups whose partly filled page must be copied first
        for group, size in enumerate(self._sizes):
            self._slide(table, group, start)
            pages = table.pages[group]
            need += max(0, -(-end // size) - len(pages))
            at, filled = divmod(start, size)
            if filled and at < len(pages) and must_copy(self.pool, pages[at], filled, refs=1):
                shared.append(group)
        fresh = self.pool.take(need + len(shared), table.owner) if need or shared else []
        if fresh is None:
            return None
        change = Change()
        for group in shared:
            at = start // self._sizes[group]
            old, new = table.pages[group][at], fresh.pop()
            table.pages[group][at] = new
            if self.pool.refs(old) > 1:
                self.pool.release([old])
            else:
                self._copied[-1].append(old)  # no load may write to it before it is read
            change.copies.append((old, new))
            change.deltas.append((group, at, [new]))
        for group, size in enumerate(self._sizes):
            pages = table.pages[group]
            more = max(0, -(-end // size) - len(pages))
            if more:
                added, fresh = fresh[:more], fresh[more:]
                change.deltas.append((group, len(pages), added))
                pages.extend(added)
        table.writable_until = min(map(mul, map(len, table.pages), self._sizes))
        return change

    def trim(self, table: PageTable, tokens: int) -> None:
        """Give back pages that were made writable for more than `tokens` tokens."""
        for group, size in enumerate(self._sizes):
            pages, kept = table.pages[group], -(-tokens // size)
            if len(pages) > kept:
                self.pool.release(pages[kept:])
                del pages[kept:]
        table.writable_until = min(
            table.writable_until, *(len(p) * size for p, size in zip(table.pages, self._sizes, strict=True))
        )

    def _slide(self, table: PageTable, group: int, start: int) -> None:
        """Give back pages that no query from `start` on can see."""
        window = self.layout.groups[group].window
        if window is None:
            return
        size, pages = self._sizes[group], table.pages[group]
        for i in range(max(0, start - window + 1) // size - 1, -1, -1):
            if pages[i] == NULL_PAGE:
                break
            self.give_back([pages[i]], size)
            pages[i] = NULL_PAGE

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same pages: copy-on-write."""
        child = PageTable(len(self._sizes), table.owner)
        table.writable_until = 0  # the next write of either must look whether it copies
        for group, pages in enumerate(table.pages):
            self.pool.share(pages)
            child.pages[group] = list(pages)
            child.hashes[group] = list(table.hashes[group])
            child.published[group] = table.published[group]
        child.roots = table.roots
        if self.states is not None:
            child.state = self.states.fork(table.state)
        child.named_until = table.named_until
        child.next_publish = table.next_publish
        return child

    def release(self, table: PageTable, filled: int) -> None:
        """Give all pages back; `filled` tokens had been computed. The deepest pages become evictable first."""
        self.break_promises(table)
        if self.states is not None:
            self.states.drop(table.state)
        for group, pages in enumerate(table.pages):
            size = self._sizes[group]
            self.give_back(pages[filled // size :][::-1], size, size - filled % size)
            self.give_back(pages[: filled // size][::-1], size)
            table.pages[group] = []
            table.published[group] = table.written_through[group] = 0
        table.writable_until = table.next_publish = 0
        table.named_until = UNLIMITED

    def break_promises(self, table: PageTable) -> None:
        self.index.withdraw(table.promises, table)
        table.promises = []

    def give_back(self, pages: Sequence[int], size: int, empty: int = 0) -> None:
        """Release pages, all of them full; or, with `empty`, blank but for the last, which has so many empty slots."""
        gone = self.pool.release(pages)
        self.slots_allocated += len(gone) * size
        if not empty:
            self.slots_filled += len(gone) * size
        elif gone and gone[-1] == pages[-1]:
            self.slots_filled += size - empty

    # ---- pages that no sequence has -------------------------------------------------------------------------

    def cached(self, group: int, names: Iterable[bytes]) -> list[int]:
        """Device pages of consecutive names, up to the first that is not there."""
        return self.index.run(group, names)

    def hold(self, pages: Iterable[int]) -> None:
        """Keep pages alive, beside the sequences that have them."""
        self.pool.share(pages)

    def let_go(self, pages: Sequence[int]) -> None:
        """Give up pages that were held, of one run: the deepest become evictable first."""
        self.pool.release(pages[::-1])

    def begin_load(self, here: Sequence[int], keys: Sequence[Key], owner: Hashable, taker: str) -> list[int] | None:
        """Hold the pages `here` and take others for the content `keys`, which is promised to come; None, and no change,
        if there are not so many."""
        self.pool.share(here)
        fresh = self.pool.take(len(keys), taker)
        if fresh is None:
            self.pool.release(here[::-1])
        else:
            self._loading[owner] = self.index.promise(keys, owner)
        return fresh

    def loaded(self, key: Key, page: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Content has come, behind the page named `parent`."""
        self.index.publish(key, page, parent, pack(tokens))

    def end_load(self, owner: Hashable) -> None:
        """No more of what was promised comes."""
        self.index.withdraw(self._loading.pop(owner, ()), owner)

    def import_pages(self, keys: Sequence[tuple[Key, bytes, Sequence[int]]], fill: Callable[[list[int]], None]) -> bool:
        """Take a page for each (key, name of the page before it, tokens), have them filled, and leave them cached;
        False, and no change, if there are not so many."""
        pages = self.pool.take(len(keys))
        if pages is None:
            return False
        fill(pages)
        for (key, parent, tokens), page in zip(keys, pages, strict=True):
            self.index.publish(key, page, parent, pack(tokens))
        self.pool.release(pages[::-1])
        return True

    def drop_cached(self, keys: Iterable[Key] | None = None) -> int:
        """Drop cached content that no sequence uses (this, or all of it); how many pages that frees."""
        keys = None if keys is None else list(keys)
        if self.states is not None:
            self.states.drop_cached(keys)
        return self.pool.drop_idle() if keys is None else self.pool.drop_keys(keys)

    def state_pages(self, cell: int) -> list[int]:
        """The pages that a cell is made of."""
        size = self.layout.state_pages
        return list(range(self._first_cell + cell * size, self._first_cell + (cell + 1) * size))

    def cached_pages(self, most: int) -> list[int]:
        """What holds cached content and is not in use, of tokens and of snapshots: so many pages at most, the latest
        used. None where snapshots alone are more."""
        cells = self.states.idle_cells() if self.states is not None else []
        snapshots = [page for cell in cells for page in self.state_pages(cell)]
        tokens = self.pool.cached_pages()
        room = most - len(snapshots)
        return tokens[max(0, len(tokens) - room) :] + snapshots if room > 0 else []

    def keep_cached(self, pages: Sequence[int]) -> int:
        """Drop what other pages hold of `cached_pages`; how many pages that frees."""
        return self.pool.drop_others(set(pages)) if pages else self.drop_cached()

    def on_eviction(self, told: Callable[[Key, int], None]) -> None:
        """Have `told` called with content that is about to be lost, and its page."""
        self.pool.leaving = told

    def holds(self, key: Key, page: int) -> bool:
        """Whether the page is where this content is looked up."""
        return self.index.key_of(page) == key

    def reset_counters(self) -> None:
        self.pool.peak = self.pool.used
        self.slots_allocated = self.slots_filled = 0

    def check(self, tables: Sequence[PageTable]) -> None:
        """Every reference is held by exactly one table entry."""
        self.pool.check()
        if self.states is not None:
            self.states.check([table.state for table in tables])
        held = dict(Counter(page for pages in self._copied for page in pages))
        for table in tables:
            for pages in table.pages:
                for page in pages:
                    if page != NULL_PAGE:
                        held[page] = held.get(page, 0) + 1
        assert sum(held.values()) == sum(self.pool.refs(p) for p in range(self.pool.total + 1)), "leaked references"
        for page, count in held.items():
            assert self.pool.refs(page) == count, f"page {page}: {self.pool.refs(page)} references, {count} holders"
