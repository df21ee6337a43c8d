"""Connections that one process accepts and others answer: who gets them, how many there may be, what becomes of those
that nobody takes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fake_frontend import FakeFrontend

from quire.serve.core.shared_counts import SharedCounts
from quire.serve.http.app import create_app, create_serving
from quire.serve.http.bounded_server import Server
from quire.serve.workers.connections import Acceptor, Receiver, give
from quire.types.serving import ServeOptions


class Taker:
    """A worker in this process: what it takes is answered by a server of its own."""

    def __init__(self, server: Server, counts: SharedCounts, row: int, ssl: object = None):
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._counts, self._row = counts, row
        self.given = 0
        self.willing = True
        self.receiver = Receiver(theirs, server.new_protocol, counts, ssl)
        self.ends = (self._ours, theirs)

    @property
    def open(self) -> int:
        return self.given - int(self._counts.of_row(self._row, "ended"))

    def give(self, connection: socket.socket, word: bytes) -> bool:
        taken = self.willing and give(self._ours, connection, word)
        self.given += taken
        return taken


class Port:
    url: str
    takers: list[Taker]
    server: Server
    acceptor: Acceptor


@contextlib.asynccontextmanager
async def port(folder: Path, options: ServeOptions) -> AsyncIterator[Port]:
    found, listener = Port(), socket.create_server(("127.0.0.1", 0))
    server = found.server = Server(create_app(create_serving(FakeFrontend())), options)  # type: ignore[arg-type]
    running = asyncio.ensure_future(server.serve([]))
    await server.up.wait()
    each = [SharedCounts((), rows=3, row=row, file=folder / "counts") for row in (1, 2)]
    found.takers = [Taker(server, counts, counts.row, server.config.ssl) for counts in each]
    found.acceptor = Acceptor(listener, lambda: found.takers, options.max_connections)
    found.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield found
    finally:
        found.acceptor.close()
        server.should_exit = True
        await running
        for taker in found.takers:
            taker.receiver.close()
            for end in taker.ends:
                end.close()
        listener.close()


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, number = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(number))


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return await asyncio.wait_for(reader.readline(), 20)


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_each_goes_to_whoever_has_the_fewest(tmp_path: Path) -> None:
    async with port(tmp_path, ServeOptions()) as found:
        opened = [await connect(found.url) for _ in range(10)]
        assert {await answered(*one) for one in opened} == {b"HTTP/1.1 200 OK\r\n"}
        assert [taker.open for taker in found.takers] == [5, 5]
        for _, writer in opened:
            writer.close()
        await until(lambda: [taker.open for taker in found.takers] == [0, 0])


async def test_the_bound_is_over_all(tmp_path: Path) -> None:
    async with port(tmp_path, ServeOptions(max_connections=3)) as found:
        opened = [await connect(found.url) for _ in range(3)]
        for one in opened:
            assert await answered(*one) == b"HTTP/1.1 200 OK\r\n"
        reader, writer = await connect(found.url)
        assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        writer.close()
        opened[0][1].close()
        await until(lambda: sum(taker.open for taker in found.takers) == 2)
        another = await connect(found.url)
        assert await answered(*another) == b"HTTP/1.1 200 OK\r\n"
        for _, writer in (*opened[1:], another):
            writer.close()


async def test_while_nobody_takes_any_they_wait(tmp_path: Path) -> None:
    async with port(tmp_path, ServeOptions()) as found:
        for taker in found.takers:
            taker.willing = False
        opened = [await connect(found.url) for _ in range(3)]
        waiting = [asyncio.ensure_future(answered(*one)) for one in opened]
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert not done
        found.takers[1].willing = True
        assert set(await asyncio.gather(*waiting)) == {b"HTTP/1.1 200 OK\r\n"}
        assert [taker.open for taker in found.takers] == [0, 3]
        for _, writer in opened:
            writer.close()


async def test_a_worker_that_is_gone_takes_none(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, socket.create_server(("127.0.0.1", 0)) as any_other:
        assert not give(ours, any_other, b"1")


async def test_tls_is_spoken_by_who_takes_it(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    async with port(tmp_path, ServeOptions(ssl_certfile=cert, ssl_keyfile=key)) as found:
        reader, writer = await connect(found.url)  # in clear
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in await reader.read()
        writer.close()
        async with httpx.AsyncClient(verify=False) as http:
            answer = await http.get(found.url.replace("http", "https") + "/health", headers={"host": "localhost"})
        assert answer.json() == {"status": "ok"}
        await until(lambda: sum(taker.open for taker in found.takers) == 0)


async def test_bytes_without_a_descriptor_are_nobodys_connection(tmp_path: Path) -> None:
    async with port(tmp_path, ServeOptions()) as found:
        found.takers[0].ends[0].send(b"?")
        one = await connect(found.url)
        assert await answered(*one) == b"HTTP/1.1 200 OK\r\n"
        one[1].close()
