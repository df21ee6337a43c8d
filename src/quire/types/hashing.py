"""Names for pages by content: each page's hash covers its tokens and, through its parent, all before them.

Keyed and cryptographic (BLAKE2b): an outsider can neither construct a collision nor, without the tenant's
salt, name another tenant's pages.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence

DIGEST = 16


def new_key() -> bytes:
    return secrets.token_bytes(32)


class PageHasher:
    """Hashes the pages of one page size. `root` depends on key, page size and salt."""

    def __init__(self, key: bytes, tokens_per_page: int):
        self._key = key
        self._size = tokens_per_page

    def root(self, salt: str) -> bytes:
        seed = f"{self._size}:{salt}".encode()
        return hashlib.blake2b(seed, digest_size=DIGEST, key=self._key, person=b"quire-root").digest()

    def extend(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        data = parent + array("i", tokens).tobytes()
        return hashlib.blake2b(data, digest_size=DIGEST, key=self._key, person=b"quire-page").digest()

    def chain(self, parent: bytes, tokens: Sequence[int], first: int = 0) -> list[bytes]:
        """Hashes of the full pages of `tokens` from page `first` on; `parent` is the hash before them."""
        hashes = []
        for start in range(first * self._size, len(tokens) - self._size + 1, self._size):
            parent = self.extend(parent, tokens[start : start + self._size])
            hashes.append(parent)
        return hashes
