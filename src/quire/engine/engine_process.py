"""The engine process: `python -m quire.engine.engine_process ADDRESS PARENT-PID`, started by ProcessLink. Its options
come on standard input, as JSON: a spare waits there, everything imported. Or, where ADDRESS is tcp://..., a replica,
with its options as a third argument; its ReplicaMembership comes on standard input from the actor that hosts it. A
fourth is the descriptor of its link to who holds weights.

One frame a step goes out, or a heartbeat when there is nothing to say; client messages are taken in between steps.
Further clients come as the first one says (`attached_clients`). It ends when told to, when its parent is gone, or, a
replica, when its client has not been heard of for long. A replica whose connection breaks drops what it worked on, and
joins again.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from quire.engine.attached_clients import AttachedClients
from quire.engine.core import EngineCore
from quire.engine.gc_control import give_back, shed, tidy
from quire.engine.hub_session import HubSession
from quire.engine.link import SERVED_NAME, handle
from quire.memory.cache_events import CacheEventRecorder
from quire.types.config import EngineOptions
from quire.types.errors import QuireError
from quire.types.events import TokenEvent
from quire.types.grammar import GrammarSpec
from quire.types.hashing import PageHasher
from quire.types.logs import configure_child
from quire.types.membership import RESTART_EXIT_CODE, PeerLink, ReplicaMembership
from quire.types.messages import (
    MAX_FRAME,
    Attach,
    CacheEvents,
    Detach,
    EngineInfo,
    Events,
    Failed,
    Heartbeat,
    Ready,
    Shutdown,
    ToClient,
    ToEngine,
)
from quire.types.parent_watch import end_with_parent

log = logging.getLogger(__name__)

IDLE_POLL_MS = 250
QUIET_S = 1.0  # without work, from which on there is time for what nobody waits for
AHEAD_S = 0.1  # seconds that a process with all imports waits for its options before it knows that it is a spare
HEARTBEAT_INTERVAL_S = 0.5  # seconds of silence before a heartbeat
CHECK_INTERVAL_S = 1.0  # seconds of idleness between looks whether all is in order
ORPHAN_TIMEOUT_S = 60.0  # seconds without a word from its client after which a replica ends
REJOIN_INTERVAL_S = 0.5  # between attempts of a replica to join again


class EngineProcess:
    def __init__(self, address: str, member: ReplicaMembership | None = None):
        self._context = zmq.Context()
        self._heartbeat_fd = -1 if member is None else member.heartbeat_fd
        self._member = member
        self._address = address
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._recorder: CacheEventRecorder | None = None
        self._ready: Ready | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._session: HubSession | None = None
        self._attached = AttachedClients(self._context, self._poller)
        if member is None:
            self._socket = self._context.socket(zmq.PAIR)
            for name, value in ((zmq.LINGER, 2000), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_FRAME)):
                self._socket.setsockopt(name, value)
            self._socket.connect(address)
            self._poller.register(self._socket, zmq.POLLIN)
        else:
            self._open_session(member, 0)
            if member.heartbeat_fd >= 0:
                os.set_blocking(member.heartbeat_fd, False)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._sent = self._beat = time.monotonic()
        self._heard = float("inf")

    def _open_session(self, member: ReplicaMembership, number: int) -> None:
        """One of several on a socket of their client's, over a network."""
        self._session = HubSession(self._context, self._address, member, number)
        self._socket = self._session.socket
        for source in (self._socket, self._session.monitor):
            self._poller.register(source, zmq.POLLIN)

    def announce(self, core: EngineCore, info: EngineInfo) -> None:
        """The engine is ready. A replica names its pages as its router does, unless a tier names them, and tells of
        them."""
        memory, page_tokens, connector = core.scheduler.memory, 0, ""
        if (member := self._member) is not None and memory.prefix_cache and not core.capacity.naming:
            key = bytes.fromhex(member.page_key)
            memory.name_pages_by(lambda size: PageHasher(key, size))
            self._recorder = memory.record_events(member.block_tokens)
            page_tokens = memory.layout.groups[0].tokens_per_page
            if member.connector:
                peers = PeerLink(member.connector, own_address(self._address), member.keys, member.page_key)
                connector = core.connect(peers)
                if core.connector is not None:
                    core.connector.wake_by(self.wake)
        self._ready = Ready(info, os.getpid(), socket.gethostname(), page_tokens, connector=connector)
        if member is not None:
            self._ready.number, self._ready.process = member.number, member.identity
            self._heard = time.monotonic()
        self.send(self._ready)
        self.beat()

    def _stay_joined(self, core: EngineCore) -> None:
        """Where the connection broke, others go on with what this engine worked on. It joins again, with nothing to
        do but with its weights and its cached pages."""
        session, member, ready = self._session, self._member, self._ready
        if session is None or not (why := session.lost()):
            return
        assert member is not None and ready is not None
        dropped = core.abort_all()
        if session.heard:
            log.warning("the link to the client is lost: %s; %d requests are dropped here", why, dropped)
            session.heard = False
        if time.monotonic() - session.opened < REJOIN_INTERVAL_S:
            return
        for source in (session.socket, session.monitor):
            self._poller.unregister(source)
        session.close(lost=True)
        self._open_session(member, session.number + 1)
        self.send(self._ready_now(core, ready))
        if self._recorder is not None:
            self._recorder.repeat()

    def _ready_now(self, core: EngineCore, ready: Ready) -> Ready:
        return replace(ready, info=replace(ready.info, adapters=core.adapters.list()))

    def wake(self) -> None:
        """From any thread: there is something to do."""
        with suppress(BlockingIOError, OSError):  # full of wakes already, or closed
            os.write(self._wake_out, b"w")

    def _waits(self, most_ms: int) -> bool:
        """Whether nothing came for so long."""
        ready = dict(self._poller.poll(most_ms))
        if self._wake_in in ready:
            os.read(self._wake_in, 4096)
        return not ready

    def beat(self) -> None:
        """Tell the actor that hosts this process that it goes on."""
        if self._heartbeat_fd >= 0:
            with suppress(BlockingIOError, BrokenPipeError):  # it is gone, and this process about to be
                os.write(self._heartbeat_fd, b".")
        self._beat = time.monotonic()

    def show_life(self) -> float:
        """Heartbeats, to client and actor, where it is time for them. What time it is."""
        now = time.monotonic()
        if now - self._sent > HEARTBEAT_INTERVAL_S:
            self.send(Heartbeat())
        self._attached.show_life(now, HEARTBEAT_INTERVAL_S)
        if now - self._beat > HEARTBEAT_INTERVAL_S:
            self.beat()
        return now

    def send(self, message: ToClient) -> None:
        with suppress(zmq.Again):  # the connection broke, which its session tells
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK if self._session is not None else 0)
        self._sent = time.monotonic()

    def serve(self, core: EngineCore) -> bool:
        """Step while there is work, listen always. Whether another process is to follow this one."""
        checked, worked = 0.0, time.monotonic()
        core.on_progress = self.show_life
        while True:
            self._stay_joined(core)
            if not core.busy:
                core.settle()
            if core.busy:
                worked = time.monotonic()
            quiet = time.monotonic() - worked > QUIET_S
            idle = not core.busy and self._waits(0 if core.idle(quiet=quiet) else IDLE_POLL_MS)
            if idle and time.monotonic() - checked > CHECK_INTERVAL_S:
                self._attached.forget_ended()
                core.scheduler.check()  # no request is left: time to look whether all is in order
                tidy()
                checked = time.monotonic()
            now = self.show_life()
            events = self._attached.receive(core)
            while self._socket.poll(0):
                message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
                self._on_heard(now)
                if isinstance(message, Shutdown):
                    return message.restart
                events += self._handle(core, message)
                if core.scheduler.first_batch_waits:
                    break
            if now - self._heard > ORPHAN_TIMEOUT_S:  # and nothing is waiting to be heard
                log.warning("nothing heard from the client for %.0f s; the replica ends", now - self._heard)
                return False
            if core.busy:
                events += core.step()
            if events and (events := self._attached.deliver(events)):
                self.send(Events(events))
            while self._recorder is not None and (changes := self._recorder.take()):
                self.send(CacheEvents(*changes))

    def _handle(self, core: EngineCore, message: ToEngine) -> list[TokenEvent]:
        """Do what the client asks that this engine was started by; events to tell."""
        if isinstance(message, Attach):
            assert self._ready is not None
            self._attached.attach(message, self._ready_now(core, self._ready))
        elif isinstance(message, Detach):
            self._attached.detach(core, message.client)
        events: list[TokenEvent] = []
        for reply in handle(core, message):
            if isinstance(reply, Events):
                events += reply.events
            else:
                self.send(reply)
        return events

    def _on_heard(self, now: float) -> None:
        self._heard = max(self._heard, now)
        if self._session is not None and not self._session.heard:
            self._session.heard = True
            if self._session.number:
                log.info("the client is reached again")

    def close(self) -> None:
        self._attached.close()
        if self._session is not None:
            self._session.close()
        else:
            self._socket.close()
        self._context.term()
        for descriptor in (self._wake_in, self._wake_out):
            os.close(descriptor)


def own_address(server: str) -> str:
    """The address by which other machines reach this one, as far as who reaches that server can tell."""
    host, _, port = server.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))  # sends nothing
        return str(way.getsockname()[0])


def main(address: str, parent: str, options: str = "", holder: str = "") -> int:
    configure_child("engine")
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides when to stop, and drains first
        signal.signal(number, signal.SIG_IGN)
    replica = not address.startswith("ipc://")
    member = msgspec.json.decode(sys.stdin.buffer.read(), type=ReplicaMembership) if replica else None
    end_with_parent(int(parent), None if replica else Path(address.removeprefix("ipc://")).parent)
    process = EngineProcess(address, member)
    began = time.perf_counter()
    try:
        from quire.engine.build import build_engine, import_kernels

        imports = time.perf_counter() - began
        ahead = ""
        if not options and not select.select([sys.stdin], [], [], AHEAD_S)[0]:
            import_kernels()
            ahead = " (ahead)"
        said = options or sys.stdin.read()
        if not said:  # a spare that is not needed
            return 0
        if not replica:  # which joins by its first word, once it is ready
            process.send(Heartbeat())  # the options are here; loading says nothing until it is done
        weights = socket.socket(fileno=int(holder)) if holder else None
        given = json.loads(said)
        configure_child("engine", model=given.pop(SERVED_NAME, ""))
        core, info = build_engine(EngineOptions.of(**given), progress=sys.stderr.isatty(), holder=weights)
        info.reasons[-1] += f", imports {imports:.2f} s{ahead}"
        for reason in info.reasons:
            log.info(reason)
        shed()  # the engine lives as long as the process
        process.announce(core, info)
        first = core.executor.prepare(GrammarSpec("json_object"))  # a client's first finds the vocabulary made
        first.add_done_callback(lambda _: give_back())
        restart = process.serve(core)
        core.close()
        return RESTART_EXIT_CODE if restart else 0
    except QuireError as error:
        process.send(Failed(type(error).__name__, str(error)))
        return 1
    except Exception as error:
        log.exception("the engine died")
        process.send(Failed("EngineDeadError", f"the engine died: {type(error).__name__}: {error}"))
        return 1
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
