"""Names for pages by content: each page's hash covers its tokens and, through its parent, all before them.

Keyed and cryptographic (BLAKE2b): an outsider can neither construct a collision nor, without the tenant's
salt, name another tenant's pages.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence

DIGEST_BYTES = 16
RUN_PAGES = 16  # pages named at a time where they were named before
MAX_RUNS = 2048  # such runs remembered, about 4 KiB each
MAX_ROOTS = 1024  # salts of which the root is remembered


class Root(bytes):
    """What the first page of a prompt comes after: no page's name."""


def new_key() -> bytes:
    return secrets.token_bytes(32)


class PageHasher:
    """Hashes the pages of one page size. `root` depends on key, page size and salt.

    Prompts begin alike (system prompts, conversations): runs of pages met lately are looked up, not hashed again.
    """

    def __init__(self, key: bytes, tokens_per_page: int):
        self._key = key
        self._page = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key, person=b"quire-page")  # copied for each
        self._size = self.tokens_per_page = tokens_per_page
        self._roots: dict[str, Root] = {}  # by salt; oldest first
        self._runs: dict[tuple[bytes, bytes], list[bytes]] = {}  # (hash before, tokens) → hashes; oldest first

    def root(self, salt: str) -> Root:
        if (found := self._roots.get(salt)) is None:
            seed = f"{self._size}:{salt}".encode()
            digest = hashlib.blake2b(seed, digest_size=DIGEST_BYTES, key=self._key, person=b"quire-root").digest()
            if len(self._roots) >= MAX_ROOTS:
                del self._roots[next(iter(self._roots))]
            found = self._roots[salt] = Root(digest)
        return found

    def chain(self, parent: bytes, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Hashes of the full pages of `tokens` from page `first` on; `parent` is the hash before them."""
        end = len(tokens) // self._size * self._size
        named = tokens[first * self._size : end] if first or end < len(tokens) else tokens
        data = struct.pack(f"{len(named)}i", *named)  # several times as fast as an array of them
        page = 4 * self._size
        whole = len(data) // (page * RUN_PAGES) * page * RUN_PAGES
        hashes: list[bytes] = []
        for start in range(0, whole, page * RUN_PAGES):
            run = self._run(parent, data[start : start + page * RUN_PAGES], page)
            hashes += run
            parent = run[-1]
        return hashes + self._hash(parent, data[whole:], page)

    def _run(self, parent: bytes, data: bytes, page: int) -> list[bytes]:
        found = self._runs.pop((parent, data), None)  # and in again, as the latest
        if found is None:
            found = self._hash(parent, data, page)
            if len(self._runs) >= MAX_RUNS:
                del self._runs[next(iter(self._runs))]
        self._runs[parent, data] = found
        return found

    def _hash(self, parent: bytes, data: bytes, page: int) -> list[bytes]:
        hashes, blank = [], self._page.copy
        for start in range(0, len(data), page):
            one = blank()
            one.update(parent + data[start : start + page])
            parent = one.digest()
            hashes.append(parent)
        return hashes
