"""The remote tier: signed pages on a Redis or Valkey server that several engines share.

How long pages stay is the server's own business (`maxmemory-policy allkeys-lru`). A server that does not answer, or too
slowly, is left alone for a while: every job ends at once with nothing done, and what was wanted is computed. Refuses to
know: other engines.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from quire.runtime.tiers.signed_page import PageSigner
from quire.runtime.tiers.worker_thread import ThreadedTier
from quire.types.errors import ConfigError
from quire.types.transfer import REMOTE, Bytes, Key

SOCKET_TIMEOUT_S = 2.0  # without a byte
READ_TIMEOUT_S = 20.0  # for all pages that one request waits for, however slowly they come
RETRY_AFTER_S = 5.0  # after a server did not answer
BATCH_BYTES = 16 << 20  # of one request
SECRET_NAME = "quire:secret"


def connect(url: str) -> Any:
    """A client of the server; ConfigError if the package is missing."""
    try:
        import redis
    except ImportError:
        raise ConfigError("--kv-remote needs the redis package; install it with: pip install 'quire[redis]'") from None
    once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)  # what fails is left alone for a while anyway
    timeouts = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": SOCKET_TIMEOUT_S}
    return redis.Redis.from_url(url, retry=once, **timeouts)


def shared_secret(client: Any, offered: bytes = b"") -> bytes:
    """The secret that all engines on a server key their names with: the first one offered."""
    client.set(SECRET_NAME, offered or secrets.token_bytes(32), nx=True)
    return bytes(client.get(SECRET_NAME))


class RemoteTier(ThreadedTier):
    name = REMOTE
    separate_reader = True

    def __init__(self, client: Any, signer: PageSigner, signal: threading.Event):
        self._client = client
        self._signer = signer
        self._batch = max(1, BATCH_BYTES // signer.page_bytes)
        self._down_until = 0.0
        super().__init__(signal)

    def _do(self, job: Any) -> list[bool]:
        if time.monotonic() < self._down_until:
            return [False] * len(job.keys)
        limit = threading.Timer(READ_TIMEOUT_S, self._client.connection_pool.disconnect)
        limit.daemon = True
        if job.kind in ("get", "find"):  # for which somebody waits
            limit.start()
        try:
            return super()._do(job)
        except Exception:
            self._down_until = time.monotonic() + RETRY_AFTER_S
            raise
        finally:
            limit.cancel()

    def _name(self, key: Key) -> str:
        group, name = key
        return f"quire:{self._signer.namespace}:{group}:{name.hex()}"

    def _put(self, keys: list[Key], pages: Sequence[Bytes]) -> list[bool]:
        done: list[bool] = []
        for start in range(0, len(keys), self._batch):
            pipe = self._client.pipeline(transaction=False)
            for key, page in zip(keys[start : start + self._batch], pages[start : start + self._batch], strict=True):
                pipe.set(self._name(key), b"".join(self._signer.sign(key, page)))
            done += [answer is True for answer in pipe.execute(raise_on_error=False)]
        return done

    def _get(self, keys: list[Key], into: Sequence[Bytes]) -> list[bool]:
        done: list[bool] = []
        for start in range(0, len(keys), self._batch):
            part = keys[start : start + self._batch]
            found = self._client.mget([self._name(key) for key in part])
            done += [
                data is not None and self._signer.verify(key, data, buffer)
                for key, data, buffer in zip(part, found, into[start : start + self._batch], strict=True)
            ]
        return done

    def _find(self, keys: list[Key]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(self._name(key))
        return [answer == 1 for answer in pipe.execute()]

    def _drop(self, keys: list[Key]) -> list[bool]:
        pipe = self._client.pipeline(transaction=False)
        for key in keys:
            pipe.delete(self._name(key))
        return [answer == 1 for answer in pipe.execute()]

    def close(self) -> None:
        super().close()
        self._client.close()
