"""Thoughts that a caller keeps and sends back, as `encrypted_content`.

Nothing is hidden by it: the thought stands beside it in the response, and callers may send thoughts of their own. So
there is no key, and any server, after any restart, reads what another made; a checksum tells what was not made so.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "qr2_"  # of this way of writing it
_SUM = 4  # bytes


def carried(text: str) -> str:
    raw = text.encode("utf-8", "replace")
    return _MARK + base64.urlsafe_b64encode(_checksum(raw) + raw).decode()


def thought_in(given: str) -> str | None:
    """The text; None for what `carried` has not made."""
    try:
        raw = base64.b64decode(given.removeprefix(_MARK).encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    whole = given.startswith(_MARK) and len(raw) >= _SUM and raw[:_SUM] == _checksum(raw[_SUM:])
    return raw[_SUM:].decode("utf-8", "replace") if whole else None


def _checksum(raw: bytes) -> bytes:
    return zlib.crc32(raw).to_bytes(_SUM, "big")
