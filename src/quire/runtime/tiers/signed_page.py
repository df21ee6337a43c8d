"""A signed page, as it is stored outside the engine: nothing but this page of this model is taken for it.

    "QKVP" | header length, 2 bytes | header (msgpack) | page | checksum, 16 bytes

The checksum is HMAC-SHA256 over all before it, which most CPUs have instructions for; the key comes from the store's
secret and the model's fingerprint.
Refuses to know: where it is stored.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec
import numpy as np

from quire.types.kv import KVLayout
from quire.types.transfer import Bytes, Key

MAGIC = b"QKVP"
VERSION = 2
CHECKSUM_BYTES = 16
_START = struct.Struct("<4sH")

SignedPage = tuple[bytes, memoryview, bytes]  # one after the other; the page itself is not copied


class Header(msgspec.Struct, array_like=True):
    version: int
    fingerprint: bytes  # of the model and of how it is computed
    dtype: str
    layout: list[tuple[int, int, int, int]]  # per group: layers, tokens a page, KV heads, head dimension
    group: int
    name: bytes
    size: int  # bytes of the page


class PageSigner:
    """Signs pages of one kind of engine, and verifies what such an engine signed."""

    def __init__(self, secret: bytes, fingerprint: bytes, layout: KVLayout):
        self.fingerprint = fingerprint
        self.page_bytes = layout.page_bytes
        self.layout = layout
        self._dtype = layout.dtype
        self._layout = [(len(g.layers), g.tokens_per_page, g.kv_heads, g.head_dim) for g in layout.groups]
        kind = msgspec.msgpack.encode((VERSION, fingerprint, self._dtype, self._layout))
        # Where the secret, the model or the layout differ, so do all names and checksums.
        self.naming = _derive(secret, kind, b"quire-naming")
        self.namespace = _derive(secret, kind, b"quire-space")[:16].hex()
        self._mac = hmac.new(_derive(secret, kind, b"quire-seal"), digestmod="sha256")

    @property
    def overhead(self) -> int:
        """Bytes a signed page has beside the page."""
        return len(self._header((0, bytes(16)), self.page_bytes)) + CHECKSUM_BYTES

    def sign(self, key: Key, page: Bytes) -> SignedPage:
        header = self._header(key, page.nbytes)
        content = np.ascontiguousarray(page).data
        return header, content, self._checksum(header, content)

    def verify(self, key: Key, data: bytes | memoryview, into: Bytes) -> bool:
        """Put the page where it belongs; False, and nothing is changed, if this is not that page, whole."""
        header = self._header(key, into.nbytes)  # equal pages have equal headers: nothing foreign is ever decoded
        view, start = memoryview(data), len(header)
        if len(view) != start + into.nbytes + CHECKSUM_BYTES or view[:start] != header:
            return False
        content = view[start:-CHECKSUM_BYTES]
        if not hmac.compare_digest(self._checksum(header, content), bytes(view[-CHECKSUM_BYTES:])):
            return False
        np.copyto(into, np.frombuffer(content, dtype=np.uint8))
        return True

    def _header(self, key: Key, size: int) -> bytes:
        group, name = key
        fields = Header(VERSION, self.fingerprint, self._dtype, self._layout, group, name, size)
        packed = msgspec.msgpack.encode(fields)
        return _START.pack(MAGIC, len(packed)) + packed

    def _checksum(self, header: bytes, content: memoryview) -> bytes:
        mac = self._mac.copy()
        mac.update(header)
        mac.update(content)
        return mac.digest()[:CHECKSUM_BYTES]


def _derive(secret: bytes, kind: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(kind, digest_size=32, key=secret, person=purpose).digest()
