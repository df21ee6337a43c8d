"""A picture of the engine at one moment, for people: requests, steps, pages, prefixes. No tokens."""

from __future__ import annotations

import msgspec

from quire.types.events import EngineStats

BLANK, CACHED, SHARED, OWNED = 0, 1, 2, 3  # what a page holds; from OWNED on: OWNED + place in `owners`


class LiveSequence(msgspec.Struct, array_like=True):
    request: str
    branch: int
    status: str
    age: float
    prompt: int
    computed: int
    outputs: int
    limit: int
    cached: int
    pages: int


class TierPages(msgspec.Struct):
    """One tier's pages: `cells` of `pages_per_cell` pages each, by what they hold."""

    name: str
    total: int
    used: int
    cached: int
    pages_per_cell: int
    cells: list[int]


class PrefixNode(msgspec.Struct, array_like=True):
    """A run of pages that always follow each other; `parent` is its place in the list, -1 at a root."""

    parent: int
    pages: int
    used: int  # of them, referenced now
    children: int


class EngineView(msgspec.Struct, kw_only=True):
    now: float  # wall-clock outside the engine, as all times in messages
    stats: EngineStats
    slots: int
    max_batch_tokens: int
    page_size: int
    sequences: list[LiveSequence]  # running first, then waiting; not all of a long queue
    owners: list[str]  # "request/branch" of the sequences that hold pages
    tiers: list[TierPages]
    prefixes: list[PrefixNode]
    steps: list[tuple[int, int]]  # (rows, tokens) of the latest steps
