"""CPU time that API processes spend on one streamed token.

    python scripts/api_cpu_per_token.py [--streams 64] [--tokens 300] [--interval 0.03] [--rounds 3] [--api-workers 1]

A server as `quire serve` runs it, with the default model's tokenizer, stands over an engine process that draws one
token per request and step at a steady pace; another process drains the sockets. Counted is the user and system time of
all threads of the API processes (the main process, and API workers where there are several) between the first step and
the last, so that neither the requests' preparation nor their end is in it. Tokens per chunk are reported too: a server
that lags coalesces, and looks cheaper than it is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil

from quire.assets import resolve
from quire.engine.client import AsyncClient
from quire.engine.engine_process import EngineProcess
from quire.engine.frontend import Frontend
from quire.engine.pair_link import PairLink
from quire.serve.http.server import run_server
from quire.text import TextModel
from quire.types.events import EngineStats, TokenEvent
from quire.types.logs import configure
from quire.types.messages import EngineInfo, Ready
from quire.types.request import FinishReason, Request
from quire.types.serving import ServeOptions

MODEL = "smollm2-135m"
WORKER = "quire.serve.workers.api_worker"
TEXT = (
    'A page table maps "virtual" addresses to frames; each entry holds a frame number and a few bits.\n'
    "Caches, naïve or not, trade space for time: déjà vu — at 3 µs a miss.\n\n1. look up\n2. fetch\n3. retry\n"
)
PATHS = ("/v1/chat/completions", "/v1/completions")


class PacedCore:
    """Stands in for an engine: once `streams` requests are there, each gets a token every `interval` seconds. `pipe` is
    told what the API processes used meanwhile."""

    def __init__(self, pipe: Any, ids: list[int], streams: int, interval: float):
        self.scheduler = SimpleNamespace(first_batch_waits=False, check=lambda: None, memory=None)
        self.adapters = SimpleNamespace(list=list)
        self.on_progress = self.settle = lambda: None
        self._pipe, self._ids, self._streams, self._interval = pipe, ids, streams, interval
        self._requests: list[str] = []
        self._step = 0
        self._due = self._began = 0.0
        self._used: dict[int, float] = {}

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def idle(self, *, quiet: bool) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats()

    def submit(self, request: Request) -> None:
        self._requests.append(request.id)
        if len(self._requests) == self._streams:
            self._due = time.monotonic() + 0.5  # let the work of arriving end first

    def abort(self, request_id: str) -> list[TokenEvent]:
        return []

    finish_at = abort  # nobody hangs up, nor stops early

    def step(self) -> list[TokenEvent]:
        if len(self._requests) < self._streams:
            time.sleep(0.001)
            return []
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due += self._interval
        if self._step == 0:
            self._used, self._began = processor_times(), time.monotonic()
        last = self._step == len(self._ids) - 1
        if last:
            time.sleep(0.3)  # everything before is out
            self._tell(time.monotonic() - self._began)
        finish = FinishReason.LENGTH if last else None
        token = [self._ids[self._step]]
        events = [TokenEvent(request, 0, self._step, token, finish) for request in self._requests]
        self._step += 1
        if last:
            self._requests, self._step = [], 0
        return events

    def _tell(self, seconds: float) -> None:
        used = [seconds - self._used[pid] for pid, seconds in processor_times().items()]
        count = self._step * self._streams
        self._pipe.send({"us": 1e6 * sum(used) / count, "most": max(used) / seconds, "seconds": seconds})


def processor_times() -> dict[int, float]:
    """Of the API processes: the server that started this one, and its workers."""
    server = psutil.Process(os.getppid())
    api = [server, *(child for child in server.children() if WORKER in child.cmdline())]
    return {process.pid: sum(process.cpu_times()[:2]) for process in api}


def engine(address: str, pipe: Any, tokens: int, streams: int, interval: float) -> None:
    tokenizer = TextModel.load(resolve(MODEL, progress=False)).tokenizer
    ids = tokenizer.encode(TEXT * (tokens // 40 + 1), add_special=False)[:tokens]
    info = EngineInfo(
        model=MODEL, max_model_len=8192, vocab_size=tokenizer.vocab_size, pages=1 << 20, page_size=16,
        max_batch_tokens=8192, depth=1, device="none", dtype="none", reasons=[], slots=streams,
    )  # fmt: skip
    process, core = EngineProcess(address), PacedCore(pipe, ids, streams, interval)
    process.announce(core, info)  # type: ignore[arg-type]
    process.serve(core)  # type: ignore[arg-type]


class EngineLink(PairLink):
    def _ended(self) -> str:
        return ""

    def close(self, *, force: bool = False) -> None:
        self._release()


def serve(pipe: Any, results: Any, workers: int, tokens: int, streams: int, interval: float) -> None:
    configure(level="warning")
    link = EngineLink(Path(tempfile.mkdtemp(prefix="quire-")) / "engine.sock")
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=engine, args=(link.address, results, tokens, streams, interval), daemon=True).start()
    while not (ready := [each for each in link.receive(1) if isinstance(each, Ready)]):
        pass
    link.info = ready[0].info

    async def frontend() -> Frontend:
        return Frontend(AsyncClient(link), TextModel.load(resolve(MODEL, progress=False)), MODEL)

    options = ServeOptions(port=0, api_workers=workers)
    run_server(frontend, options, announce=lambda url, model, locked: pipe.send(str(url)))


def drain(url: str, path: str, streams: int, tokens: int) -> tuple[int, int]:
    """Open the streams, read them to their end; returns (chunks, bytes)."""
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": tokens, "ignore_eos": True}
    body |= {"prompt": "Hello"} if path == PATHS[1] else {"messages": [{"role": "user", "content": "Hello"}]}
    data = json.dumps(body).encode()
    where = urlsplit(url)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection((where.hostname, where.port))
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    chunks = size = 0
    while selector.get_map():
        for key, _ in selector.select():
            got = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            key.data.extend(got)
            if not got or key.data.endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                assert key.data.startswith(b"HTTP/1.1 200") and b"[DONE]" in key.data, bytes(key.data[:400])
                chunks += key.data.count(b"data: {")
                size += len(key.data)
    return chunks, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--interval", type=float, default=0.03, help="seconds between steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api-workers", type=int, default=1)
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    (ours, theirs), (results, told) = spawn.Pipe(), spawn.Pipe(duplex=False)
    arguments = (theirs, told, given.api_workers, given.tokens, given.streams, given.interval)
    server = spawn.Process(target=serve, args=arguments)
    server.start()
    url = ours.recv()
    try:
        for number in range(given.rounds + 1):  # the first warms up
            for path in PATHS:
                chunks, size = drain(url, path, given.streams, given.tokens)
                result = results.recv()
                if number:
                    ratio, drawn = given.streams * given.tokens / chunks, given.streams * given.tokens
                    wire = f"{ratio:.2f} tokens per chunk, {size / drawn:.0f} bytes per token"
                    rate = f"{drawn / result['seconds']:,.0f} tokens/s"
                    print(
                        f"{path:22} {result['us']:6.1f} us per token ({wire}, {rate}, the busiest process "
                        f"{result['most']:.0%} of a core, {result['seconds']:.1f} s)",
                        flush=True,
                    )
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    sys.exit(main())
