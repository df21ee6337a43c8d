"""A Redis server behind a network that fails: no job waits for it longer than said, and no page is taken that is not
whole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from fault_proxy import FaultProxy
from test_failover import until

from quire.runtime.tiers import redis as remote
from quire.runtime.tiers.redis import RemoteTier, connect
from quire.runtime.tiers.signed_page import PageSigner
from quire.types.kv import KVGroup, KVLayout
from quire.types.transfer import TierDone, TierJob

LAYOUT = KVLayout((KVGroup(layers=(0, 1), tokens_per_page=16, kv_heads=8, head_dim=64),), "float32")
KEYS = [(0, bytes([i]) * 16) for i in range(8)]


class Server:
    """As much of Redis as a tier asks for."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                writer.write(self._answer(*words))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, command: bytes, *words: bytes) -> bytes:
        match command.upper():
            case b"HELLO":
                return b"%1\r\n+proto\r\n:3\r\n"
            case b"SET":
                self.values[words[0]] = words[1]
            case b"MGET":
                found = [self.values.get(word) for word in words]
                parts = [b"_\r\n" if one is None else b"$%d\r\n%s\r\n" % (len(one), one) for one in found]
                return b"*%d\r\n" % len(parts) + b"".join(parts)
        return b"+OK\r\n"


class Tier:
    def __init__(self, url: str):
        self._tier = RemoteTier(connect(url), PageSigner(bytes(32), b"model", LAYOUT), threading.Event())
        self.pages = [np.full(LAYOUT.page_bytes, i, np.uint8) for i in range(len(KEYS))]
        self.close = self._tier.close

    async def job(self, kind: str) -> TierDone:
        buffers = self.pages if kind == "put" else [np.zeros_like(page) for page in self.pages]
        found: list[TierDone] = []
        self._tier.submit(TierJob(1, kind, KEYS, buffers))

        def done() -> bool:
            found.extend(self._tier.poll())
            return bool(found)

        await until(done)
        if kind == "get":
            came = zip(buffers, self.pages, found[0].done, strict=True)
            assert all((got == page).all() for got, page, ok in came if ok)
        return found[0]


@asynccontextmanager
async def remote_tier() -> AsyncIterator[tuple[Tier, FaultProxy]]:
    server = await asyncio.start_server(Server(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with FaultProxy(f"127.0.0.1:{port}") as proxy:
        tier = Tier(f"redis://127.0.0.1:{proxy.port}/0")
        try:
            assert all((await tier.job("put")).done)
            yield tier, proxy
        finally:
            proxy.reset()
            await asyncio.to_thread(tier.close)
            server.close()


@pytest.mark.parametrize("fault", ["partition", "trickle", "reset"])
async def test_no_job_waits_longer_than_said_and_pages_come_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SOCKET_TIMEOUT_S", 0.3)
    monkeypatch.setattr(remote, "READ_TIMEOUT_S", 0.6)
    monkeypatch.setattr(remote, "RETRY_AFTER_S", 0.5)
    async with remote_tier() as (tier, proxy):
        assert all((await tier.job("get")).done)
        if fault == "partition":
            proxy.partition()
        elif fault == "trickle":
            proxy.to_client.rate = 100_000.0  # bytes a second, of half a megabyte
        else:
            proxy.reset()
        first = await tier.job("get")
        if fault != "reset":  # which a new connection mends, or what it holds is computed
            assert not any(first.done)
            assert not any((await tier.job("get")).done), "it is left alone"
        proxy.to_client.rate = 0.0
        proxy.heal()
        for _ in range(200):
            if all((await tier.job("get")).done):
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("its pages never came again")
