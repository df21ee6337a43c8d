"""CPU time that the API process spends on one streamed token.

    python scripts/api_cpu_per_token.py [--streams 64] [--tokens 300] [--interval 0.03] [--rounds 3]

A server as `quire serve` runs it, with the default model's tokenizer, stands over a link whose engine draws one token
per request and step at a steady pace; a second process drains the sockets. Counted is the user and system time of all
the server's threads between the first step and the last, so that neither the requests' preparation nor their end is in
it. Tokens per chunk are reported too: a server that lags coalesces, and looks cheaper than it is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import selectors
import socket
import sys
import threading
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from quire.assets import resolve
from quire.engine.client import AsyncClient
from quire.engine.frontend import Frontend
from quire.serve.http.server import run_server
from quire.text import TextModel
from quire.types.events import TokenEvent
from quire.types.messages import Abort, EngineInfo, Events, Submit
from quire.types.request import FinishReason
from quire.types.serving import ServeOptions

MODEL = "smollm2-135m"
TEXT = (
    'A page table maps "virtual" addresses to frames; each entry holds a frame number and a few bits.\n'
    "Caches, naïve or not, trade space for time: déjà vu — at 3 µs a miss.\n\n1. look up\n2. fetch\n3. retry\n"
)
PATHS = ("/v1/chat/completions", "/v1/completions")


class PacedLink:
    """Stands in for an engine: once `streams` requests are there, each gets a token every `interval` seconds."""

    def __init__(self, text: TextModel, streams: int, tokens: int, interval: float):
        self.info = EngineInfo(
            model=MODEL, max_model_len=8192, vocab_size=text.tokenizer.vocab_size, pages=1 << 20, page_size=16,
            max_batch_tokens=8192, depth=1, device="none", dtype="none", reasons=[], slots=streams,
        )  # fmt: skip
        self.heard = time.monotonic()
        self.results: deque[dict[str, float]] = deque()
        self._ids = text.tokenizer.encode(TEXT * (tokens // 40 + 1), add_special=False)[:tokens]
        self._streams, self._interval = streams, interval
        self._requests: list[str] = []
        self._step = 0
        self._due = self._cpu = self._began = 0.0
        self._woken = threading.Event()

    def send(self, message: Any) -> None:
        if isinstance(message, Submit):
            self._requests.append(message.request.id)
            if len(self._requests) == self._streams:
                self._due = time.monotonic() + 0.5  # let the work of arriving end first
        elif isinstance(message, Abort) and message.request in self._requests:
            self._requests.remove(message.request)

    def receive(self, timeout: float | None) -> list[Any]:
        self.heard = time.monotonic()
        if len(self._requests) < self._streams:
            self._woken.wait(timeout)
            self._woken.clear()
            return []
        time.sleep(max(0.0, self._due - self.heard))
        self._due += self._interval
        if self._step == 0:
            self._cpu, self._began = time.process_time(), time.monotonic()
        last = self._step == len(self._ids) - 1
        if last:
            time.sleep(0.3)  # everything before is out
            used, count = time.process_time() - self._cpu, self._step * self._streams
            self.results.append({"us": 1e6 * used / count, "seconds": time.monotonic() - self._began})
        finish = FinishReason.LENGTH if last else None
        token = [self._ids[self._step]]
        events = [TokenEvent(request, 0, self._step, token, finish) for request in self._requests]
        self._step += 1
        if last:
            self._requests, self._step = [], 0
        return [Events(events)]

    def wake(self) -> None:
        self._woken.set()

    def close(self, *, force: bool = False) -> None:
        pass


def serve(pipe: Any, streams: int, tokens: int, interval: float) -> None:
    text = TextModel.load(resolve(MODEL, progress=False))
    link = PacedLink(text, streams, tokens, interval)

    async def frontend() -> Frontend:
        return Frontend(AsyncClient(link), text, MODEL)

    def results() -> None:
        while pipe.recv():
            while not link.results:
                time.sleep(0.05)
            pipe.send(link.results.popleft())

    threading.Thread(target=results, daemon=True).start()
    run_server(frontend, ServeOptions(port=0), announce=lambda url, model, locked: pipe.send(str(url)))


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
    given = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, given.streams, given.tokens, given.interval)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
    server.start()
    url = ours.recv()
    try:
        for number in range(given.rounds + 1):  # the first warms up
            for path in PATHS:
                ours.send(True)
                chunks, size = drain(url, path, given.streams, given.tokens)
                result = ours.recv()
                if number:
                    ratio, drawn = given.streams * given.tokens / chunks, given.streams * given.tokens
                    wire = f"{ratio:.2f} tokens per chunk, {size / drawn:.0f} bytes per token"
                    print(f"{path:22} {result['us']:6.1f} us per token ({wire}, {result['seconds']:.1f} s)", flush=True)
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    sys.exit(main())
