"""What one caller can do to a server: memory of the API process and the slowest /health while it is attacked.

    python scripts/attacks.py [MODEL] [--only NAME] [--mib 80]

Starts `quire serve` with two keys, gRPC and a folder of files, and puts every attack to both HTTP ports and to gRPC. An
attack runs in a process of its own while /health is asked again and again; afterwards the second key uploads, batches
and chats. `tests/serve/test_attacks.py` puts the same attacks to a server without an engine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MIB = 1 << 20
SECONDS = 10.0  # that an attack takes at most
KEYS = {"alice": "alice-secret-0123456789", "bob": "bob-secret-0123456789"}
Address = tuple[str, int]


# ---- bytes, without a key -----------------------------------------------------------------------------------


def send(address: Address, head: bytes, rest: bytes, size: int, answers: int = 0) -> int:
    """A head and `size` bytes of `rest` over and over, answers read, so many waited for; how much the server took."""
    sent, until = len(head), time.monotonic() + SECONDS
    with socket.create_connection(address, timeout=SECONDS) as peer:
        reader = threading.Thread(target=_drop, args=(peer, answers), daemon=True)
        reader.start()
        block = rest * max(1, 65536 // len(rest))
        with suppress(OSError):
            peer.sendall(head)
            while sent < size and time.monotonic() < until:
                peer.sendall(block)
                sent += len(block)
        if answers:
            reader.join(SECONDS)
        with suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)
        reader.join(10)
    return sent


def _drop(peer: socket.socket, answers: int = 0) -> None:
    left = answers
    with suppress(OSError):
        while (data := peer.recv(65536)) and not (answers and left <= 0):
            left -= data.count(b"HTTP/1.1 200")


def _at_once(count: int, work: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CHUNKED = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
TINY = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def trailers(address: Address, size: int) -> None:
    """Header fields after the body, without end."""
    send(address, CHUNKED + b"0\r\n", b"a:b\r\n", size)


def trailer_name(address: Address, size: int) -> None:
    """One trailer, whose name has no end."""
    send(address, CHUNKED + b"0\r\n", b"a", size)


def chunk_extension(address: Address, size: int) -> None:
    """The line of a chunk's size, without end."""
    send(address, CHUNKED + b"1;", b"a", size)


def tiny_chunks(address: Address, size: int) -> None:
    """Chunks of one byte, from eight connections."""
    _at_once(8, lambda: send(address, CHUNKED, b"1\r\nx\r\n", size // 8))


def empty_lines_in_chunks(address: Address, size: int) -> None:
    """A chunk that looks as if the body were over at every fourth byte."""
    send(address, CHUNKED + b"%x\r\n" % size, b"\r\n\r\n", size)


def blank_lines(address: Address, size: int) -> None:
    """A request, and then nothing but line ends."""
    send(address, TINY, b"\r\n", size)


def endless_body(address: Address, size: int) -> None:
    """A body that goes on after the response."""
    send(address, TINY[:-2] + b"content-length: %d\r\n\r\n" % (1 << 40), b"x", size)


def pipelined(address: Address, size: int) -> None:
    """Tiny requests, none of which waits for an answer, from eight connections."""
    each = min(size, 2 * MIB) // 8
    _at_once(8, lambda: send(address, TINY, TINY, each, answers=each // len(TINY)))


def unread(address: Address, size: int) -> None:
    """The same, by clients that never read."""
    peers = [socket.create_connection(address, timeout=1) for _ in range(8)]
    for peer in peers:
        with suppress(OSError):
            for _ in range(min(size, 8 * MIB) // 65536 // 8):
                peer.sendall(TINY * (65536 // len(TINY)))
    for peer in peers:
        peer.close()


def half_heads(address: Address, size: int) -> None:
    """Heads that never end, from 200 connections."""
    peers = [socket.create_connection(address, timeout=5) for _ in range(200)]
    for peer in peers:
        with suppress(OSError):
            peer.sendall(TINY[:-2] + b"a: " + b"x" * min(60_000, size // 200))
    time.sleep(0.5)
    for peer in peers:
        peer.close()


WIRE = {
    attack.__name__: attack
    for attack in (
        trailers, trailer_name, chunk_extension, tiny_chunks, empty_lines_in_chunks, blank_lines, endless_body,
        pipelined, unread, half_heads,
    )
}  # fmt: skip


# ---- gRPC, without a key ------------------------------------------------------------------------------------


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0)
# :method POST, :scheme http, and literals without indexing
PATH = b"/quire.v1.Quire/Generate"
POST = b"\x83\x86" + b"\x04" + bytes([len(PATH)]) + PATH + b"\x0f\x10\x10application/grpc" + b"\x00\x02te\x08trailers"


def continuations(address: Address, size: int) -> None:
    """Headers that go on from frame to frame, from eight connections that never acknowledge the server's limits."""
    field = b"\x00\x01a\x01b" * 2000
    _at_once(8, lambda: send(address, HELLO + _frame(1, 0, 1, POST), _frame(9, 0, 1, field), size // 8))


def tiny_fields(address: Address, size: int) -> None:
    """Calls whose headers are many fields of one byte each, from eight connections."""

    def call() -> None:
        peer = socket.create_connection(address, timeout=SECONDS)
        reader = threading.Thread(target=_drop, args=(peer,), daemon=True)
        reader.start()
        fields = POST + b"\x40\x01a\x01b" + b"\xbe" * 450  # "a: b", and the same from the table
        with suppress(OSError):
            peer.sendall(HELLO)
            for stream in range(1, 2 * min(size // 8 // len(fields), 2000), 2):
                peer.sendall(_frame(1, 4, stream, fields))
        reader.join(1)  # what was sent is being answered
        peer.close()

    _at_once(8, call)


def pings(address: Address, size: int) -> None:
    send(address, HELLO, _frame(6, 0, 0, b"12345678") * 1000, size // 4)


def rapid_reset(address: Address, size: int) -> None:
    """Calls that are opened and reset at once."""
    peer = socket.create_connection(address, timeout=10)
    threading.Thread(target=_drop, args=(peer,), daemon=True).start()
    with suppress(OSError):
        peer.sendall(HELLO)
        for first in range(1, min(size // 100, 40_000) * 2, 400):
            streams = range(first, first + 400, 2)
            reset = struct.pack(">I", 8)
            peer.sendall(b"".join(_frame(1, 4, stream, POST) + _frame(3, 0, stream, reset) for stream in streams))
    peer.close()


def large_messages(address: Address, size: int) -> None:
    """Messages as large as they may be, by callers without a key."""
    import grpc

    # Fields of the protobuf: prompt (a string) as large as --max-body allows.
    text = b"x" * (15 * MIB)
    length, rest = b"", len(text)
    while rest >= 128:
        length, rest = length + bytes([rest & 127 | 128]), rest >> 7
    message = b"\x12" + length + bytes([rest]) + text

    def call() -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel("{}:{}".format(*address), own) as channel, suppress(grpc.RpcError):
            list(channel.unary_stream(PATH.decode())(message, timeout=SECONDS))

    _at_once(min(16, size // (5 * MIB)), call)


RPC = {attack.__name__: attack for attack in (continuations, tiny_fields, pings, rapid_reset, large_messages)}


# ---- the API, with a key ------------------------------------------------------------------------------------


class Caller:
    """One key's HTTP connection."""

    def __init__(self, address: Address, key: str):
        self._peer = http.client.HTTPConnection(*address, timeout=60)
        self._headers = {"authorization": f"Bearer {key}"}

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            headers.setdefault("content-type", "application/json")
        with suppress(OSError):  # refused before all of it was sent; the answer may be there
            self._peer.request(method, path, data, self._headers | headers)
        try:
            response = self._peer.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException):
            self._peer.close()
            return 0, None
        with suppress(ValueError):
            return response.status, json.loads(content)
        return response.status, content

    def upload(self, content: bytes) -> tuple[int, Any]:
        form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch'
        form += b'\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + content
        kind = {"content-type": "multipart/form-data; boundary=B"}
        return self.call("POST", "/v1/files", form + b"\r\n--B--\r\n", **kind)

    def batch(self, file: str, **fields: Any) -> tuple[int, Any]:
        body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
        return self.call("POST", "/v1/batches", body)


def line_of(model: str, name: str, tokens: int = 4) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def many_batches(caller: Caller, model: str, count: int) -> None:
    """As many batches as the server takes; the file of each is bad, so that they are over at once."""
    file = caller.upload(b"nonsense")[1]["id"]
    for _ in range(count):
        caller.batch(file, metadata={"a": "x" * 500})


def long_batches(caller: Caller, model: str, count: int) -> None:
    """Batches that take long, as many as may wait."""
    file = caller.upload(b"\n".join(line_of(model, str(number), 64) for number in range(2000)))[1]["id"]
    for _ in range(min(count, 100)):
        caller.batch(file)


def fat_metadata(caller: Caller, model: str, count: int) -> None:
    """Metadata of megabytes."""
    file = caller.upload(b"nonsense")[1]["id"]
    for _ in range(min(count, 20)):
        caller.batch(file, metadata={"a": "x" * (4 * MIB)})


def many_files(caller: Caller, model: str, count: int) -> None:
    for _ in range(count):
        caller.upload(b"x")


def fat_listings(caller: Caller, model: str, count: int) -> None:
    """Everything there is, as one page."""
    for path in ("/v1/files", "/v1/batches") * 10:
        caller.call("GET", f"{path}?limit=10000")


def full_store(caller: Caller, model: str, count: int) -> None:
    """As many bytes as the server takes."""
    for _ in range(count // 100):
        caller.upload(b"x" * (64 * MIB))


API = {
    attack.__name__: attack
    for attack in (many_batches, fat_metadata, many_files, fat_listings, long_batches, full_store)
}


def lives(caller: Caller, model: str) -> str:
    """What becomes of another key's upload, batch and chat; "" if all is well."""
    status, file = caller.upload(line_of(model, "a"))
    if status != 200:
        return f"upload: {status} {file}"
    status, batch = caller.batch(file["id"])
    if status != 200:
        return f"batch: {status} {batch}"
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    status, answer = caller.call("POST", "/v1/chat/completions", body)
    if status != 200:
        return f"chat: {status} {answer}"
    until = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed") and time.monotonic() < until:
        time.sleep(0.05)
        batch = caller.call("GET", f"/v1/batches/{batch['id']}")[1]
    return "" if batch["status"] == "completed" else f"batch: {batch['status']}"


# ---- measuring ----------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


class Probe:
    """Asks /health again and again; the slowest answer, in seconds, and the memory that the server came to."""

    def __init__(self, address: Address, pid: int):
        self.address, self.pid = address, pid
        self.worst, self.most, self.asked, self.failed = 0.0, 0, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not (self._stop.wait(0.01) and self.asked):
            began = time.perf_counter()
            peer = http.client.HTTPConnection(*self.address, timeout=60)
            try:
                peer.request("GET", "/health")
                self.failed += peer.getresponse().status != 200
            except (OSError, http.client.HTTPException):
                self.failed += 1
            peer.close()
            self.worst = max(self.worst, time.perf_counter() - began)
            self.most = max(self.most, resident(self.pid))
            self.asked += 1


@contextmanager
def serving(model: str) -> Iterator[tuple[int, Address, Address, Address, str]]:
    """A server: its pid, where its API, its admin API and gRPC are, and the model's name."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text("".join(f'[[key]]\nname = "{name}"\nkey = "{secret}"\n' for name, secret in KEYS.items()))
        keys.chmod(0o600)
        command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--grpc-port", "0", "--api-keys"]
        command += [str(keys), "--files", f"{folder}/files", "--log-level", "warning"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=os.environ)
        assert server.stdout
        try:
            said = next(line for line in server.stdout if line.startswith("Quire serves"))
            found = re.search(r"serves (\S+) at http://(\S+):(\d+) .*admin: http://(\S+):(\d+); gRPC: port (\d+)", said)
            assert found, said
            name, host, port, admin_host, admin_port, rpc = found.groups()
            yield server.pid, (host, int(port)), (admin_host, int(admin_port)), (host, int(rpc)), name
        finally:
            server.terminate()
            server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--only", help="attacks whose name has this in it")
    parser.add_argument("--mib", type=int, default=80, help="bytes that an attack sends at most")
    parser.add_argument("--count", type=int, default=2000, help="calls that an attack with a key makes at most")
    given = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with serving(given.model) as (pid, public, admin, rpc, model):
        bob = Caller(public, KEYS["bob"])
        assert not lives(bob, model)
        ports = (("API", public, WIRE), ("admin", admin, WIRE), ("gRPC", rpc, RPC))
        rounds: list[tuple[str, Callable[[], None]]] = [("nothing", lambda: time.sleep(SECONDS))]
        rounds += [
            (f"{name} ({port})", lambda attack=attack, at=at: attack(at, given.mib * MIB))  # type: ignore[misc]
            for port, at, attacks in ports
            for name, attack in attacks.items()
        ]
        alice = KEYS["alice"]
        rounds += [
            (name, lambda attack=attack: attack(Caller(public, alice), model, given.count))  # type: ignore[misc]
            for name, attack in API.items()
        ]
        print(f"{'attack':34} {'memory':>10} {'/health':>10} {'took':>8}  the other key")
        for name, attack in rounds:
            if given.only and given.only not in name:
                continue
            before, began = resident(pid), time.perf_counter()
            with Probe(public, pid) as probe:
                attacker = context.Process(target=attack)
                attacker.start()
                attacker.join()
            took = time.perf_counter() - began
            grown = (probe.most - before) / MIB
            well = lives(Caller(public, KEYS["bob"]), model) or "as if alone"
            print(f"{name:34} {grown:+6.1f} MiB {1e3 * probe.worst:7.0f} ms {took:6.1f} s  {well}", flush=True)


if __name__ == "__main__":
    main()
