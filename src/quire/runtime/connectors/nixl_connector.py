"""The NIXL connector: pages are read by NIXL (RDMA where there is any, else what UCX finds), messages go over TCP.

    source: signed pages in a registered buffer ──(metadata, address, token; CURVE)──► target: READ ──► its own buffer
            the buffer is free again ◄──────────────(token, a notification of NIXL)───────────┘  └► copied, verified

What NIXL must know of a peer (its metadata and addresses) comes over the authenticated link alone. NIXL itself neither
encrypts nor authenticates, so that pages are copied out of its reach before they are verified. The agent has no
progress thread, which would keep a core busy: the connector's own drives it while anything is under way. Refuses to
know: what pages are for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections import deque
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from quire.runtime.connectors import send_window
from quire.runtime.connectors.handover_frames import Pages
from quire.runtime.connectors.page_connector import BATCH_BYTES, signed_bytes
from quire.runtime.connectors.tcp import POLL_MS, TcpConnector
from quire.runtime.tiers.signed_page import SignedPage
from quire.types.errors import ConfigError

# Of this engine's buffers whose pages peers have not read, or it has not heard that they did.
MAX_SENT_BYTES = send_window.MAX_UNREAD_BYTES * 5 // 4
MAX_READS = 8  # under way at a time
READ_TIMEOUT_S = 10.0
BUSY_POLL_MS = 1  # while pages are being read, by this engine or of it


class _Place(msgspec.Struct, array_like=True):
    """Where a message's pages lie."""

    metadata: bytes  # of the agent and its buffer
    address: int
    size: int  # of one page, or part of one, signed
    count: int
    token: bytes  # that the reader answers with


class _Buffer:
    """Registered memory for the pages of one message."""

    def __init__(self, agent: Any, size: int):
        self.bytes = np.empty(size, np.uint8)
        self.address: int = self.bytes.ctypes.data
        self.registration = agent.register_memory([(self.address, size, 0, "")], "DRAM")
        self.metadata: bytes = agent.get_partial_agent_metadata(self.registration, True, ["UCX"])


class _Read:
    def __init__(self, frame: Pages, place: _Place, source: str):
        self.frame, self.place, self.source = frame, place, source
        self.began = 0.0
        self.handle: Any = None
        self.buffer: _Buffer | None = None


class NixlConnector(TcpConnector):
    def __init__(self, host: str, *args: Any, **kwargs: Any):
        self._agent = _agent(host)
        self._agent_lock = threading.Lock()  # the engine's thread packs, the connector's reads
        self._free: list[_Buffer] = []
        self._sent_buffers: dict[bytes, tuple[str, _Buffer]] = {}  # by token, with the hand-over: not read yet
        self._queued: deque[_Read] = deque()
        self._reads: list[_Read] = []
        self._abandoned: list[_Read] = []  # that NIXL may still write to the buffers of
        self._agents: dict[str, tuple[str, set[bytes]]] = {}  # by source: its agent, and what is known of it
        super().__init__(host, *args, **kwargs)
        page, overhead = self._signer.page_bytes, self._signer.overhead + 1  # a part's name is longer than a page's
        smallest = min(part.end - part.start for parts in self._parts for part in parts)
        self._buffer_size = max(BATCH_BYTES, page) + max(1, BATCH_BYTES // smallest) * overhead

    def close(self) -> None:
        super().close()
        with self._agent_lock:
            for read in (*self._reads, *self._abandoned):
                self._release(read)
            self._free, self._sent_buffers, self._reads, self._agent = [], {}, [], None

    # ---- pages that peers read ------------------------------------------------------------------------------

    def _pack(self, handover: str, signed: list[SignedPage]) -> list[bytes]:
        size = signed_bytes(signed[0])
        with self._agent_lock:
            buffer = self._take_buffer()
            content = b"".join(chain.from_iterable(signed))
            buffer.bytes[: len(content)] = np.frombuffer(content, np.uint8)
            token = secrets.token_bytes(16)
            self._sent_buffers[token] = handover, buffer
        return [msgspec.msgpack.encode(_Place(buffer.metadata, buffer.address, size, len(signed), token))]

    def _take_buffer(self) -> _Buffer:
        self._take_back()
        if self._free:
            return self._free.pop()
        if (len(self._sent_buffers) + 1) * self._buffer_size > MAX_SENT_BYTES:
            raise OSError(errno.ENOBUFS, "peers have not read what they asked for before")
        try:
            return _Buffer(self._agent, self._buffer_size)
        except Exception as error:  # NIXL's own have no common ancestor
            raise OSError(errno.ENOMEM, f"NIXL could not register memory: {error}") from error

    def _take_back(self) -> None:
        """Buffers of which nobody waits for what is in them any more."""
        now, routes = self._clock(), self._routes
        for token, (handover, _) in list(self._sent_buffers.items()):
            if (route := routes.get(handover)) is None or route.is_stale(now):
                self._free.append(self._sent_buffers.pop(token)[1])

    # ---- pages of peers, on the connector's thread ----------------------------------------------------------

    def _on_pages(self, frame: Pages, parts: Any) -> bool:
        with self._lock:
            fetch = self._fetches.get(frame.handover)
        if fetch is None:
            self._drop("nobody waits for its pages")
            return True
        try:
            place = msgspec.msgpack.decode(parts[0], type=_Place)
            if place.count != len(frame.keys) or not 0 < place.count * place.size <= self._buffer_size:
                raise ValueError("keys and pages differ in number, or are too large")
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            self._unreadable(frame, error)
            return True
        self._queued.append(_Read(frame, place, fetch.handover.source))
        return False

    def _advance(self) -> int:
        with self._agent_lock:
            ended = [(read, error) for read in list(self._reads) for state, error in [self._state(read)] if state]
            while self._queued and len(self._reads) - len(ended) < MAX_READS:
                read = self._queued.popleft()
                self._reads.append(read)
                state, error = self._begin(read)
                ended += [(read, error)] if state else []
            for tokens in self._agent.get_new_notifs().values() if self._sent_buffers or self._reads else ():
                self._free += [self._sent_buffers.pop(token)[1] for token in tokens if token in self._sent_buffers]
            arrived = [(read, error, self._finish(read, error)) for read, error in ended]
            self._take_back()
            busy = bool(self._reads or self._queued or self._sent_buffers)
        for read, error, pages in arrived:
            if error is None:
                self._take_pages(read.frame, pages)
            else:
                self._unreadable(read.frame, error)
            self._acknowledge(read.source)
        return BUSY_POLL_MS if busy else POLL_MS

    def _begin(self, read: _Read) -> tuple[bool, Exception | None]:
        """Whether it is over at once, and why if not well."""
        agent, place = self._agent, read.place
        try:
            read.buffer = self._free.pop() if self._free else _Buffer(agent, self._buffer_size)
            name, known = self._agents.get(read.source, ("", set()))
            if place.metadata not in known:
                name = agent.add_remote_agent(place.metadata).decode()
                self._agents[read.source] = name, known | {place.metadata}
            size = place.count * place.size
            local = agent.get_xfer_descs([(read.buffer.address, size, 0)], "DRAM")
            remote = agent.get_xfer_descs([(place.address, size, 0)], "DRAM")
            read.handle = agent.initialize_xfer("READ", local, remote, name, place.token)
            read.began = self._clock()
            state = agent.transfer(read.handle)
        except Exception as error:  # NIXL's own have no common ancestor
            return True, error
        return (False, None) if state == "PROC" else self._ended(state)

    def _state(self, read: _Read) -> tuple[bool, Exception | None]:
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as error:  # NIXL's own have no common ancestor
            return True, error
        if state == "PROC":
            late = self._clock() - read.began > READ_TIMEOUT_S
            return late, TimeoutError(f"not read within {READ_TIMEOUT_S:g} s") if late else None
        return self._ended(state)

    def _ended(self, state: str) -> tuple[bool, Exception | None]:
        return True, None if state == "DONE" else OSError(errno.EIO, "NIXL could not read them")

    def _finish(self, read: _Read, error: Exception | None) -> list[bytes]:
        """Its pages, out of NIXL's reach, and its buffer for the next."""
        self._reads.remove(read)
        pages = []
        if error is None and read.buffer is not None:
            size = read.place.size
            pages = [read.buffer.bytes[i * size : (i + 1) * size].tobytes() for i in range(read.place.count)]
        self._abandoned.append(read)
        for one in [one for one in self._abandoned if self._release(one)]:
            self._abandoned.remove(one)
            self._free += [one.buffer] if one.buffer is not None else []
        return pages

    def _release(self, read: _Read) -> bool:
        """False where NIXL may still write to its buffer."""
        if read.handle is not None:
            try:
                read.handle.release()
            except Exception:  # NIXL's own have no common ancestor
                return False
        return True

    def _lost(self, source: str) -> None:
        super()._lost(source)
        with self._agent_lock:
            name, _ = self._agents.pop(source, ("", None))
            if name:
                with contextlib.suppress(Exception):  # it may be disconnected already
                    self._agent.remove_remote_agent(name)


def _agent(host: str) -> Any:
    if host.startswith("127."):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # nobody else is to connect
    logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(f"kv_connector nixl needs the package nixl: pip install 'quire[nixl]' ({error})") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_agent(f"quire-{secrets.token_hex(8)}", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise ConfigError("kv_connector nixl needs NIXL's UCX backend, which is not there")
    return agent
