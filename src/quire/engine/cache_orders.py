"""Orders to the KV cache, carried out between steps: look, pin, drop, export, import.

An exported prefix is a bundle of token ids and page contents. It says which model and layout it is of; on import the
pages get this engine's own names, so that a bundle can go from any engine to any other of the same kind.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import msgspec

from quire.memory.manager import PageTable
from quire.types.cache_orders import CacheOrder, CacheReport
from quire.types.errors import InputError, OverloadedError
from quire.types.kv import NULL_PAGE

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

VERSION = 2
MOST = 48 << 20  # bytes of a bundle
CHECKSUM = 32


class Bundle(msgspec.Struct, array_like=True):
    version: int
    model: str  # what computed it, and how
    tokens: list[int]
    pages: list[bytes]  # group by group; empty where a window has moved on


def carry_out(core: EngineCore, order: CacheOrder) -> tuple[CacheReport, bytes]:
    """The cache after an order; and, of an export, the bundle."""
    scheduler = core.scheduler
    memory, directory = scheduler.memory, scheduler.tiers.directory
    pages, data = 0, b""
    table = PageTable(len(memory.layout.groups))
    if order.action == "import":
        pages = _take_in(core, order, table)
    elif order.action == "drop":
        pages = _drop(core, order, table)
    elif order.action != "look":
        memory.hash_pages(table, order.tokens, order.salt)
        hit = memory.lookup(table, len(order.tokens) + 1)
        table.pages, table.published = hit.pages, [len(found) for found in hit.pages]
        pages = sum(table.published)
        if order.action == "pin":
            name = "pin:" + hashlib.blake2b(repr(order.tokens).encode(), digest_size=8).hexdigest()
            scheduler.sessions.keep(name, order.salt, table, time.monotonic() + order.seconds)
        else:
            data = _bundle(core, order.tokens[: hit.tokens], [page for found in hit.pages for page in found])
    stats, pool = scheduler.snapshot(), memory.pool
    report = CacheReport(
        pages=pages,
        tokens=pages * memory.layout.groups[0].tokens_per_page // len(memory.layout.groups),
        device_pages=pool.total,
        device_used=pool.used,
        device_cached=pool.cached,
        page_bytes=memory.layout.page_bytes,
        page_tokens=memory.layout.groups[0].tokens_per_page,
        hit_rate=stats.hit_rate,
        tiers=stats.tiers,
        rates=directory.costs.rates(),
        load_waits=stats.tier_waits,
        saved_seconds=stats.tier_saved,
        swaps=stats.swaps,
        preemptions=stats.preemptions,
        sessions=scheduler.sessions.view(time.monotonic()),
    )
    return report, data


def _drop(core: EngineCore, order: CacheOrder, table: PageTable) -> int:
    """Forget the pages of a prompt, or all of them, in some places or everywhere."""
    memory, directory = core.scheduler.memory, core.scheduler.tiers.directory
    names = order.tiers or ["device", *(tier.name for tier in directory.tiers)]
    unknown = set(names) - {"device", *(tier.name for tier in directory.tiers)}
    if unknown:
        raise InputError(f"no tier is called {min(unknown)!r} here", param="tiers")
    keys = None
    if order.tokens:
        memory.hash_pages(table, order.tokens, order.salt)
        keys = [(group, name) for group, hashes in enumerate(table.hashes) for name in hashes]
    count = directory.drop(names, keys)
    if "device" in names:
        count += memory.pool.forget_idle() if keys is None else memory.pool.forget_keys(keys)
    return count


def _bundle(core: EngineCore, tokens: list[int], pages: list[int]) -> bytes:
    layout = core.scheduler.memory.layout
    held = [page for page in pages if page != NULL_PAGE]
    if not held:
        raise InputError("nothing of this prompt is cached; warm it first", param="prompt")
    if len(held) * layout.page_bytes > MOST:
        raise InputError(f"{len(held)} pages are more than a bundle holds ({MOST >> 20} MiB); export a shorter prefix")
    found = dict(zip(held, core.executor.read_pages(held), strict=True))
    body = msgspec.msgpack.encode(Bundle(VERSION, _kind(core), tokens, [found.get(page, b"") for page in pages]))
    return body + hashlib.blake2b(body, digest_size=CHECKSUM).digest()


def _take_in(core: EngineCore, order: CacheOrder, table: PageTable) -> int:
    memory = core.scheduler.memory
    body, checksum = order.data[:-CHECKSUM], order.data[-CHECKSUM:]
    if hashlib.blake2b(body, digest_size=CHECKSUM).digest() != checksum:
        raise InputError("the bundle is damaged or cut short; export it again")
    try:
        bundle = msgspec.msgpack.decode(body, type=Bundle)
    except msgspec.MsgspecError as error:
        raise InputError(f"this is no bundle of pages: {error}") from None
    if bundle.version != VERSION or bundle.model != _kind(core):
        raise InputError("the bundle is of another model, precision or page layout; export it from one like this")
    memory.hash_pages(table, bundle.tokens, order.salt)
    keys = [(group, i, name) for group, names in enumerate(table.hashes) for i, name in enumerate(names)]
    if len(keys) != len(bundle.pages) or {len(page) for page in bundle.pages} - {0, memory.layout.page_bytes}:
        raise InputError("the bundle's pages do not match its tokens; export it again")
    given = [(key, page) for key, page in zip(keys, bundle.pages, strict=True) if page]
    fresh = memory.pool.take(len(given))
    if fresh is None:
        raise OverloadedError(f"{len(given)} pages are not free now; retry when fewer requests run")
    core.flush()  # pages taken just now may still have to be read, into a tier
    if fresh:
        core.executor.write_pages(fresh, [page for _, page in given])
    for ((group, i, name), _), page in zip(given, fresh, strict=True):
        memory.index.publish((group, name), page, table.hashes[group][i - 1] if i else b"")
    memory.pool.release(fresh[::-1])
    return len(given)


def _kind(core: EngineCore) -> str:
    return f"{core.executor.kind} {core.scheduler.memory.layout}"
