"""Text that a caller keeps for this server and cannot read or change: encrypted and authenticated.

The stream is SHAKE-256 of a key and a fresh nonce, the tag a keyed BLAKE2b over nonce, ciphertext and whose it is
(encrypt-then-MAC); both keys come from one secret, which lies in the server's folder (mode 0600) or goes with the
server. Refuses to know: what the text says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path

import numpy as np

SECRET = 32
NONCE = 16
TAG = 32
_MARK = "qr1_"  # of this way of sealing


class Sealer:
    def __init__(self, folder: Path | None = None):
        secret = secrets.token_bytes(SECRET) if folder is None else _secret_in(folder)
        self._stream_key = hashlib.blake2b(b"stream", key=secret).digest()
        self._tag_key = hashlib.blake2b(b"tag", key=secret).digest()

    def seal(self, text: str, owner: str) -> str:
        nonce = secrets.token_bytes(NONCE)
        hidden = self._crypted(nonce, text.encode("utf-8", "replace"))
        return _MARK + base64.urlsafe_b64encode(nonce + hidden + self._tag(nonce, hidden, owner)).decode()

    def open(self, sealed: str, owner: str) -> str | None:
        """The text; None for what this server has not sealed for this owner."""
        try:
            raw = base64.b64decode(sealed.removeprefix(_MARK).encode("ascii"), altchars=b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            return None
        nonce, hidden, tag = raw[:NONCE], raw[NONCE:-TAG], raw[-TAG:]
        if len(raw) < NONCE + TAG or not hmac.compare_digest(tag, self._tag(nonce, hidden, owner)):
            return None
        return self._crypted(nonce, hidden).decode()

    def _crypted(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._stream_key + nonce).digest(len(data))
        return (np.frombuffer(data, np.uint8) ^ np.frombuffer(stream, np.uint8)).tobytes()

    def _tag(self, nonce: bytes, hidden: bytes, owner: str) -> bytes:
        name = owner.encode()
        return hashlib.blake2b(
            len(name).to_bytes(8, "little") + name + nonce + hidden, key=self._tag_key, digest_size=TAG
        ).digest()


def _secret_in(folder: Path) -> bytes:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "reasoning.key"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET))
    except FileExistsError:
        pass
    secret = path.read_bytes()
    if len(secret) != SECRET:  # cut short when it was written: nothing was sealed with it
        path.unlink()
        return _secret_in(folder)
    return secret
