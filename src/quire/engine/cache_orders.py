"""Orders to the KV cache, carried out between steps: look, pin, drop, export, import.

An exported prefix is a bundle of token ids and page contents. It says which model and layout it is of; on import the
pages get this engine's own names, so that a bundle can go from any engine to any other of the same kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from quire.memory.manager import PageTable
from quire.scheduling import Scheduler
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.errors import InputError, OverloadedError
from quire.types.kv import NULL_PAGE
from quire.types.seams import Executor

VERSION = 2
MAX_BUNDLE_BYTES = 48 << 20
CHECKSUM_BYTES = 32


class Bundle(msgspec.Struct, array_like=True):
    version: int
    model: str  # what computed it, and how
    tokens: list[int]
    pages: list[bytes]  # group by group; empty where a window has moved on


class CacheOrders:
    def __init__(self, scheduler: Scheduler, executor: Executor, flush: Callable[[], None], clock: Callable[[], float]):
        """`flush`: begins transfers that wait for the next plan."""
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._directory = scheduler.features.tiers.directory
        self._executor = executor
        self._flush = flush
        self._clock = clock

    def carry_out(self, order: CacheOrder) -> tuple[CacheReport, bytes]:
        """The cache after an order; and, of an export, the bundle."""
        memory, data, pages = self._memory, b"", 0
        table = PageTable(len(memory.layout.groups))
        if order.action == "import":
            pages = self._import(order, table)
        elif order.action == "drop":
            pages = self._drop(order, table)
        elif order.action != "look":
            memory.hash_pages(table, order.tokens, order.salt)
            hit = memory.lookup(table, len(order.tokens) + 1)
            table.pages, table.published = hit.pages, [len(found) for found in hit.pages]
            pages = sum(table.published)
            if order.action == "pin":
                name = "pin:" + hashlib.blake2b(repr(order.tokens).encode(), digest_size=8).hexdigest()
                self._scheduler.features.sessions.keep(name, order.salt, table, self._clock() + order.seconds)
            else:
                data = self._bundle(order.tokens[: hit.tokens], [page for found in hit.pages for page in found])
        return self._report(pages), data

    def _report(self, pages: int) -> CacheReport:
        memory, stats = self._memory, self._scheduler.snapshot()
        return CacheReport(
            pages=pages,
            tokens=pages * memory.layout.groups[0].tokens_per_page // len(memory.layout.groups),
            device_pages=memory.pool.total,
            device_used=memory.pool.used,
            device_cached=memory.pool.cached,
            page_bytes=memory.layout.page_bytes,
            page_tokens=memory.layout.groups[0].tokens_per_page,
            hit_rate=stats.hit_rate,
            tiers=stats.tiers,
            rates=self._directory.costs.rates(),
            load_waits=stats.tier_waits,
            saved_seconds=stats.tier_saved,
            swaps=stats.swaps,
            preemptions=stats.preemptions,
            sessions=self._scheduler.features.sessions.view(self._clock()),
        )

    def _drop(self, order: CacheOrder, table: PageTable) -> int:
        """Drop the pages of a prompt, or all of them, in some places or everywhere."""
        places = ["device", *(tier.name for tier in self._directory.tiers)]
        names = order.tiers or places
        if unknown := set(names) - set(places):
            raise InputError(f"no tier is called {min(unknown)!r} here", param="tiers")
        keys = None
        if order.tokens:
            self._memory.hash_pages(table, order.tokens, order.salt)
            roots = enumerate(table.roots)  # of pages that the prompt fills in part, if it is that short
            keys = [*roots, *((group, name) for group, hashes in enumerate(table.hashes) for name in hashes)]
        count = self._directory.drop(names, keys)
        return count + self._memory.drop_cached(keys) if "device" in names else count

    def _bundle(self, tokens: list[int], pages: list[int]) -> bytes:
        if self._memory.layout.states:
            raise InputError(
                "this model has recurrent layers: their states are not part of a bundle, and pages alone serve nobody"
            )
        held = [page for page in pages if page != NULL_PAGE]
        if not held:
            raise InputError("nothing of this prompt is cached; warm it first", param="prompt")
        if len(held) * self._memory.layout.page_bytes > MAX_BUNDLE_BYTES:
            most = MAX_BUNDLE_BYTES >> 20
            raise InputError(f"{len(held)} pages are more than a bundle holds ({most} MiB); export a shorter prefix")
        found = dict(zip(held, self._executor.read_pages(held), strict=True))
        body = msgspec.msgpack.encode(Bundle(VERSION, self._kind, tokens, [found.get(page, b"") for page in pages]))
        return body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()

    def _import(self, order: CacheOrder, table: PageTable) -> int:
        memory = self._memory
        body, checksum = order.data[:-CHECKSUM_BYTES], order.data[-CHECKSUM_BYTES:]
        if hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest() != checksum:
            raise InputError("the bundle is damaged or cut short; export it again")
        try:
            bundle = msgspec.msgpack.decode(body, type=Bundle)
        except msgspec.MsgspecError as error:
            raise InputError(f"this is no bundle of pages: {error}") from None
        if bundle.version != VERSION or bundle.model != self._kind:
            raise InputError("the bundle is of another model, precision or page layout; export it from one like this")
        memory.hash_pages(table, bundle.tokens, order.salt)
        sizes = [group.tokens_per_page for group in memory.layout.groups]
        keys = [
            ((group, name), table.name_before(group, i), bundle.tokens[i * sizes[group] : (i + 1) * sizes[group]])
            for group, names in enumerate(table.hashes)
            for i, name in enumerate(names)
        ]
        if len(keys) != len(bundle.pages) or {len(page) for page in bundle.pages} - {0, memory.layout.page_bytes}:
            raise InputError("the bundle's pages do not match its tokens; export it again")
        given = [(key, page) for key, page in zip(keys, bundle.pages, strict=True) if page]

        def fill(pages: list[int]) -> None:
            self._flush()  # pages taken just now may still have to be read, into a tier
            if pages:
                self._executor.write_pages(pages, [page for _, page in given])

        if not memory.import_pages([key for key, _ in given], fill):
            raise OverloadedError(f"{len(given)} pages are not free now; retry when fewer requests run")
        return len(given)

    @property
    def _kind(self) -> str:
        return f"{self._executor.kind} {self._memory.layout}"
