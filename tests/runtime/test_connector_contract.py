"""One suite for every connector: pages come whole, once and to whoever asked for them, or are said not to come."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from quire.runtime.connectors import nixl_connector, page_connector, send_window, shared_memory
from quire.runtime.connectors.in_process import InProcessConnector
from quire.runtime.connectors.nixl_connector import NixlConnector
from quire.runtime.connectors.page_connector import PageConnector
from quire.runtime.connectors.shared_memory import SharedMemoryConnector
from quire.runtime.connectors.tcp import TcpConnector
from quire.runtime.tiers.signed_page import PageSigner, SignedPage
from quire.types.errors import ConfigError
from quire.types.handover import Handover
from quire.types.kv import KVGroup, KVLayout
from quire.types.membership import CurveKeys
from quire.types.transfer import Key, TierJob, Wanted

LAYOUT = KVLayout((KVGroup(layers=(0, 1), tokens_per_page=4, kv_heads=2, head_dim=8),), "float32")
SIZE = LAYOUT.page_bytes
KEYS = [(0, bytes([i]) * 16) for i in range(12)]
PATIENCE_S = 20.0
REMOTE = {"tcp": TcpConnector, "shared-memory": SharedMemoryConnector, "nixl": NixlConnector}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class CorruptingSigner(PageSigner):
    """Signs a page and then changes one bit of it."""

    def sign(self, key: Key, page: np.ndarray) -> SignedPage:
        header, content, checksum = super().sign(key, page)
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        return header, memoryview(changed), checksum


def page(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, SIZE, dtype=np.uint8)


class Link:
    """Connectors of one kind that can reach each other."""

    def __init__(self, kind: str):
        self.kind = kind
        self.peers: dict[str, InProcessConnector] = {}
        self.made: list[PageConnector] = []
        public, secret = zmq.curve_keypair()
        self.keys = CurveKeys("", public.decode(), secret.decode())

    def connector(
        self, secret: bytes = bytes(32), clock: Clock | None = None, signer: type[PageSigner] = PageSigner
    ) -> PageConnector:
        common = (signer(secret, b"model", LAYOUT), threading.Event(), clock or Clock())
        made: PageConnector
        if self.kind == "in-process":
            made = InProcessConnector(self.peers, f"engine-{len(self.made)}", *common)
        else:
            made = REMOTE[self.kind]("127.0.0.1", self.keys, *common)
        self.made.append(made)
        return made

    def end(self, connector: PageConnector) -> None:
        self.made.remove(connector)
        connector.close()


@pytest.fixture(params=["in-process", *REMOTE])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="nixl is not installed: pip install 'quire[nixl]'")
    link = Link(request.param)
    yield link
    for made in list(link.made):
        link.end(made)


class Fetch:
    """Pages asked for by `target` of `source`."""

    def __init__(
        self,
        source: PageConnector,
        target: PageConnector,
        count: int = 6,
        *,
        waits: bool = True,
        timeout: float = 10.0,
    ):
        self.source, self.target = source, target
        self.handover = Handover(f"h{id(self)}", source.address, timeout=timeout, waits=waits)
        self.keys = KEYS[:count]
        self.into = [np.zeros(SIZE, np.uint8) for _ in self.keys]
        target.submit(TierJob(1, "get", self.keys, self.into, self.handover))

    def wanted(self) -> Wanted:
        return until(self.source.take_requests)[0]

    def give(self, *places: int, content: int = 0, handover: Handover | None = None) -> list[bool]:
        keys = [KEYS[i] for i in places]
        job = TierJob(2, "put", keys, [page(i + content) for i in places], handover or self.handover)
        self.source.submit(job)
        return until(self.source.poll)[0].done

    def give_part(self, part: int, *places: int, named: int | None = None) -> list[bool]:
        """Of these pages the layers of one part; `named`: as which other it is sent."""
        of = LAYOUT.layer_parts(0)[part]
        contents = [page(i)[of.start : of.end] for i in places]
        number = part if named is None else named
        self.source.submit(TierJob(2, "put", [KEYS[i] for i in places], contents, self.handover, number))
        return until(self.source.poll)[0].done

    def gone(self, *places: int) -> None:
        self.source.submit(TierJob(3, "drop", [KEYS[i] for i in places], None, self.handover))

    def done(self) -> list[bool]:
        return until(self.target.poll)[0].done


def until(found):
    """What there is, once there is something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (something := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)
    return something


def test_pages_come_in_any_order_and_in_parts(link: Link) -> None:
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target)
    wanted = fetch.wanted()
    assert (wanted.handover, wanted.keys, wanted.waits) == (fetch.handover.id, fetch.keys, True)
    assert fetch.give(4, 1) == [True, True]
    until(lambda: target.stats.pages_received == 2)
    assert not target.poll(), "it ends when all came"
    fetch.give(0, 2, 3, 5)
    assert fetch.done() == [True] * 6
    assert all((found == page(i)).all() for i, found in enumerate(fetch.into))
    assert target.stats.completed == target.stats.started == 1 and target.stats.dropped == 0
    assert source.stats.pages_sent == 6 and source.stats.bytes_sent == target.stats.bytes_received > 6 * SIZE


def test_what_will_not_come_is_said(link: Link) -> None:
    fetch = Fetch(link.connector(), link.connector(), waits=False)
    assert not fetch.wanted().waits
    fetch.give(0, 1)
    fetch.gone(2, 3, 4, 5)
    assert fetch.done() == [True, True, False, False, False, False]
    assert fetch.target.stats.completed == 0


def test_a_page_comes_once(link: Link) -> None:
    """A replayed page changes nothing, whether its hand-over is under way or over."""
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, 3)
    fetch.wanted()
    fetch.give(0)
    until(lambda: target.stats.pages_received == 1)  # NIXL reads several at a time
    fetch.give(0, content=100)
    until(lambda: target.stats.dropped == 1)
    fetch.give(1, 2)
    assert fetch.done() == [True] * 3 and (fetch.into[0] == page(0)).all()
    until(lambda: fetch.give(1) == [False])  # the source learns that nobody waits any more
    assert (fetch.into[1] == page(1)).all()


def test_parts_of_pages_make_them_whole(link: Link) -> None:
    """In any order, beside whole pages; a page counts when all its layers are in."""
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, 4)
    fetch.wanted()
    assert fetch.give_part(0, 0, 1, 2) == [True] * 3
    fetch.give_part(1, 1)
    until(lambda: target.stats.pages_received == 1)
    fetch.give(2, 3)  # one that had come in part comes whole
    until(lambda: target.stats.pages_received == 3)
    assert not target.poll(), "one has half its layers"
    fetch.give_part(1, 0)
    assert fetch.done() == [True] * 4
    assert all((found == page(i)).all() for i, found in enumerate(fetch.into))
    assert target.stats.dropped == 0 and source.stats.bytes_sent == target.stats.bytes_received


def test_a_page_that_came_in_part_is_not_there(link: Link) -> None:
    clock = Clock()
    fetch = Fetch(link.connector(), link.connector(clock=clock), 3)
    fetch.wanted()
    fetch.give_part(0, 0, 1, 2)
    fetch.give_part(1, 1)
    fetch.gone(2)
    until(lambda: fetch.target.stats.pages_received == 1)
    clock.now = 11.0
    assert fetch.done() == [False, True, False]


def test_a_part_comes_once_and_in_its_own_place(link: Link) -> None:
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, 2)
    fetch.wanted()
    fetch.give_part(0, 0)
    fetch.give_part(0, 0)
    until(lambda: target.stats.dropped == 1)
    sign = source._signer.sign
    source._signer.sign = lambda key, content: sign((key[0], key[1][:16] + b"\0"), content)  # type: ignore[method-assign]
    fetch.give_part(1, 0)  # signed as the first part
    until(lambda: target.stats.dropped == 2)
    source._signer.sign = sign  # type: ignore[method-assign]
    for number in (2, 100):
        fetch.give_part(1, 0, named=number)
    until(lambda: target.stats.dropped == 4)
    fetch.give_part(1, 0)
    fetch.give(1)
    assert fetch.done() == [True, True] and all((found == page(i)).all() for i, found in enumerate(fetch.into))


@pytest.mark.parametrize("signer", [PageSigner, CorruptingSigner])
def test_forged_and_corrupted_pages_are_dropped_and_counted(link: Link, signer: type[PageSigner]) -> None:
    forger = link.connector(b"f" * 32 if signer is PageSigner else bytes(32), signer=signer)
    clock = Clock()
    fetch = Fetch(forger, link.connector(clock=clock), 2)
    fetch.wanted()
    fetch.give(0, 1)
    until(lambda: fetch.target.stats.dropped == 2)
    assert not any(found.any() for found in fetch.into) and not fetch.target.poll()
    clock.now = 11.0
    assert fetch.done() == [False, False]


def test_a_page_in_the_place_of_another_is_dropped(link: Link) -> None:
    """Signed, but for another key."""
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, 2)
    fetch.wanted()
    sign = source._signer.sign
    source._signer.sign = lambda key, content: sign(KEYS[5], content)  # type: ignore[method-assign]
    fetch.give(0, 1)
    until(lambda: target.stats.dropped == 2)
    assert not any(found.any() for found in fetch.into)


def test_a_hand_over_ends_when_nothing_came_for_its_timeout(link: Link) -> None:
    clock = Clock()
    fetch = Fetch(link.connector(), link.connector(clock=clock), 3)
    fetch.wanted()
    clock.now = 8.0
    fetch.give(1)
    until(lambda: fetch.target.stats.pages_received == 1)
    clock.now = 17.0
    assert not fetch.target.poll(), "nine seconds ago something came"
    clock.now = 18.5
    assert fetch.done() == [False, True, False] and fetch.target.stats.timed_out == 1
    until(lambda: fetch.give(0) == [False])  # told to stop
    assert not fetch.into[0].any(), "nothing is written once a job has ended"


def test_a_lost_source_is_known_before_the_timeout(link: Link) -> None:
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, 3)
    fetch.wanted()
    fetch.give(2)
    until(lambda: target.stats.pages_received == 1)
    link.end(source)
    assert fetch.done() == [False, False, True] and target.stats.peers_lost == 1


def test_a_source_that_never_was_is_lost(link: Link) -> None:
    source, target = link.connector(), link.connector()
    link.end(source)
    assert Fetch(source, target, 2).done() == [False, False]


def test_a_target_that_is_gone_costs_its_source_nothing(link: Link) -> None:
    source, target, other = link.connector(), link.connector(), link.connector()
    fetch = Fetch(source, target, 2)
    fetch.wanted()
    link.end(target)
    until(lambda: fetch.give(0) == [False])
    again = Fetch(source, other, 2)
    until(source.take_requests)
    again.give(0, 1)
    assert again.done() == [True, True]


def test_what_peers_may_ask_for_is_bounded(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_connector, "MAX_PENDING_HANDOVERS", 1)
    source, target = link.connector(), link.connector()
    first = Fetch(source, target, 2)
    first.wanted()
    job = TierJob(7, "get", KEYS[:2], [np.zeros(SIZE, np.uint8)] * 2, Handover("more", source.address))
    target.submit(job)
    assert until(target.poll)[0].done == [False, False], "it is told at once that nothing will come"
    assert source.stats.dropped == 1 and not source.take_requests()
    monkeypatch.setattr(page_connector, "MAX_KEYS", 1)
    target.submit(TierJob(8, "get", KEYS[:2], [np.zeros(SIZE, np.uint8)] * 2, Handover("larger", source.address)))
    assert until(target.poll)[0].done == [False, False]


def test_peers_that_left_without_a_word_keep_nobody_out(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells that nobody waits any more may be lost, with all that a network loses."""
    monkeypatch.setattr(page_connector, "MAX_PENDING_HANDOVERS", 2)
    clock = Clock()
    source, target = link.connector(clock=clock), link.connector()
    lost = []
    for _ in range(2):
        lost.append(Fetch(source, target))
        lost[-1].wanted()
    clock.now += 21.0  # twice the time after which a target gives up
    fetch = Fetch(source, target, 1)
    fetch.wanted()
    fetch.give(0)
    assert fetch.done() == [True] and source.stats.dropped == 0
    assert lost[0].give(0) == [False], "nobody waits for it"


def test_what_a_slow_peer_has_not_read_is_bounded(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_connector, "BATCH_BYTES", SIZE)
    monkeypatch.setattr(shared_memory, "FILE_BYTES", SIZE)
    monkeypatch.setattr(send_window, "MAX_UNREAD_BYTES", 3 * SIZE)
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, timeout=1.0)
    fetch.wanted()
    with monkeypatch.context() as slow:
        slow.setattr(source._window, "acknowledged", lambda route: None)  # it reads, which is not heard of
        assert fetch.give(0, 1, 2, 3, 4, 5) == [True] * 3 + [False] * 3
        assert fetch.done() == [True] * 3 + [False] * 3, "it is told, and computes the rest"
        assert source.stats.failed == 1
    assert not source._window.unread, "it counts as gone: others do not wait for it"
    for _ in range(3):  # one that reads gets all, however much that comes to: the source waits for it
        again = Fetch(source, target)
        again.wanted()
        assert again.give(*range(6)) == [True] * 6 and again.done() == [True] * 6


def test_a_burst_of_small_messages_waits_too(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_connector, "BATCH_BYTES", SIZE)
    monkeypatch.setattr(shared_memory, "FILE_BYTES", SIZE)
    monkeypatch.setattr(send_window, "MAX_UNREAD_MESSAGES", 2)
    monkeypatch.setattr(shared_memory, "MAX_UNREAD_FILES", 3)
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target)
    fetch.wanted()
    assert fetch.give(*range(6)) == [True] * 6 and fetch.done() == [True] * 6


@pytest.mark.parametrize("leaves", [True, False])
def test_a_source_that_waits_for_a_peer_hears_that_it_need_not(
    link: Link, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_connector, "BATCH_BYTES", SIZE)
    monkeypatch.setattr(shared_memory, "FILE_BYTES", SIZE)
    monkeypatch.setattr(send_window, "MAX_UNREAD_BYTES", SIZE)
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, timeout=PATIENCE_S)
    fetch.wanted()
    monkeypatch.setattr(source._window, "acknowledged", lambda route: None)
    given: list[bool] = []
    giving = threading.Thread(target=lambda: given.extend(fetch.give(0, 1)))
    giving.start()
    until(lambda: source._window.unread)
    (route,) = source._window.unread
    source._left(route) if leaves else source.stop_sending()
    giving.join(PATIENCE_S)
    assert given == [True, False]


def test_a_peer_that_dies_unread_does_not_hold_others_up(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: nothing was sent to it any more, so that nobody noticed until the hand-over's time was over."""
    if link.kind == "in-process":
        pytest.skip("it dies with its peer")
    monkeypatch.setattr(page_connector, "BATCH_BYTES", SIZE)
    monkeypatch.setattr(shared_memory, "FILE_BYTES", SIZE)
    monkeypatch.setattr(send_window, "MAX_UNREAD_MESSAGES", 2)
    monkeypatch.setattr(send_window, "PROBE_S", 0.05)
    clock = Clock()
    source, target, other = link.connector(clock=clock), link.connector(), link.connector()
    fetch, later = Fetch(source, target, timeout=60.0), Fetch(source, other, 1)
    wanted: list[Wanted] = []
    until(lambda: wanted.extend(source.take_requests()) or len(wanted) == 2)
    monkeypatch.setattr(target, "_on_pages", lambda *_: False)
    monkeypatch.setattr(target, "_send_to", lambda *_: None)  # nor does it say that it leaves
    giving = threading.Thread(target=lambda: fetch.give(*range(6)))
    giving.start()
    until(lambda: sum(map(len, source._window.unread.values())) == 2)
    link.end(target)
    giving.join(PATIENCE_S)
    assert not giving.is_alive() and later.give(0) == [True] and later.done() == [True]
    if isinstance(source, SharedMemoryConnector):
        clock.now += page_connector.MAX_TIMEOUT_S + 1
        until(lambda: not source._unread_files)  # nobody will read what the dead peer did not


def test_many_pages_go_in_messages_of_bounded_size(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_connector, "BATCH_BYTES", 2 * SIZE)
    fetch = Fetch(link.connector(), link.connector(), 12)
    fetch.wanted()
    fetch.give(*range(12))
    assert fetch.done() == [True] * 12 and all((found == page(i)).all() for i, found in enumerate(fetch.into))


def test_nobody_answers_for_another(link: Link) -> None:
    """A hand-over that one peer asked for is not given to a second one of the same name."""
    source, target, thief = link.connector(), link.connector(), link.connector()
    fetch = Fetch(source, target, 2)
    fetch.wanted()
    stolen = [np.zeros(SIZE, np.uint8) for _ in range(2)]
    thief.submit(TierJob(9, "get", KEYS[:2], stolen, fetch.handover))
    assert until(thief.poll)[0].done == [False, False]
    fetch.give(0, 1)
    assert fetch.done() == [True, True] and not any(found.any() for found in stolen)


def test_noise_on_the_link_is_dropped_and_counted(link: Link) -> None:
    if link.kind == "in-process":
        pytest.skip("there is no link that anything else could write to")
    source = link.connector()
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.curve_serverkey = peer.curve_publickey = link.keys.public.encode()
    peer.curve_secretkey = link.keys.secret.encode()
    peer.connect(source.address)
    peer.send(b"\xff noise")
    until(lambda: source.stats.dropped == 1)
    stranger = context.socket(zmq.DEALER)
    stranger.curve_serverkey = link.keys.public.encode()
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(source.address)
    stranger.send(b"let me in")
    until(lambda: source.stats.refused == 1)
    for socket in (peer, stranger):
        socket.close(linger=0)
    context.term()


def sealed(name: str) -> int:
    """A memory file that cannot grow, as one in memory that is full."""
    descriptor = memfd_create(name, os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return descriptor


def no_space(name: str) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


memfd_create = os.memfd_create


def memory_files() -> int:
    """Of this process."""
    open_files = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    return sum(one.startswith("/memfd:quire-pages") for one in open_files)


@pytest.mark.parametrize("full", [sealed, no_space])
def test_pages_that_cannot_be_written_are_said_not_to_come(
    full: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_connector, "BATCH_BYTES", 2 * SIZE)
    monkeypatch.setattr(shared_memory, "MAX_KEPT_BYTES", 0)
    link = Link("shared-memory")
    source, target = link.connector(), link.connector()
    fetch = Fetch(source, target, 6)
    fetch.wanted()
    assert fetch.give(0, 1) == [True, True]
    with monkeypatch.context() as lacking:
        lacking.setattr(os, "memfd_create", full)
        assert fetch.give(2, 3) == [False, False]
    assert fetch.give(4, 5) == [True, True], "there is room again"
    assert fetch.done() == [True, True, False, False, True, True]
    assert source.stats.failed == 1 and source.stats.pages_sent == 4
    until(lambda: not source._window.unread)  # what was not sent will never be read
    monkeypatch.setattr(os, "memfd_create", full)
    again = Fetch(source, target, 2)
    again.wanted()
    again.give(0, 1)
    assert again.done() == [False, False] and source.stats.failed == 2
    assert caplog.text.count("KV pages could not be handed over") == 1, "logged once, counted always"
    for made in list(link.made):
        link.end(made)
    assert not memory_files()


def test_no_memory_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_UNREAD_FILES", 3)
    link = Link("shared-memory")
    source, target = link.connector(), link.connector()
    for _ in range(3):
        fetch = Fetch(source, target, 2)
        fetch.wanted()
        fetch.give(0, 1)
        assert fetch.done() == [True, True]
        assert memory_files() == 1, "what was read is written to again"
    unread = Fetch(source, target, 6)
    unread.wanted()
    sent: list[list[bytes]] = []
    monkeypatch.setattr(source, "_send", lambda route, frames: sent.append(frames))
    for place in range(5):
        unread.give(place)
    assert memory_files() == 3, "the oldest goes"
    assert not source._read_files  # type: ignore[attr-defined]
    monkeypatch.undo()
    for frames in sent:
        source._send(source._routes[unread.handover.id].route, frames)
    until(lambda: target.stats.dropped == 2)
    unread.give(5)
    assert unread.done() == [False, False, True, True, True, True], "those whose file went are not waited for"
    for made in list(link.made):
        link.end(made)
    assert not memory_files()


def test_memory_files_end_with_a_killed_writer() -> None:
    """Whoever writes pages and is killed leaves nothing behind, and who was told of them is told so."""
    code = "import os, time; d = os.memfd_create('quire-pages-' + '0' * 32); print(d, flush=True); time.sleep(600)"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    descriptor = int(writer.stdout.readline())
    reader = Link("shared-memory").connector()
    assert isinstance(reader, SharedMemoryConnector)
    place = f"{writer.pid}/{descriptor}/quire-pages-{'0' * 32}".encode()
    with pytest.raises(ValueError, match="another one by now"):
        reader._unpack([place, b"1", b"9"])  # it is found: of another size
    writer.kill()
    writer.wait()
    with pytest.raises(FileNotFoundError):
        reader._unpack([place, b"1", b"9"])
    reader.close()


def test_nixl_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[nixl\]'"):
        Link("nixl").connector()


@pytest.fixture
def nixl_pair() -> Iterator[tuple[NixlConnector, NixlConnector]]:
    pytest.importorskip("nixl", reason="nixl is not installed: pip install 'quire[nixl]'")
    link = Link("nixl")
    source, target = link.connector(), link.connector()
    assert isinstance(source, NixlConnector) and isinstance(target, NixlConnector)
    yield source, target
    for made in list(link.made):
        link.end(made)


def test_registered_memory_is_bounded_and_used_again(nixl_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = nixl_pair
    for _ in range(3):
        fetch = Fetch(source, target, 2)
        fetch.wanted()
        fetch.give(0)
        fetch.give(1)
        assert fetch.done() == [True, True]
        until(lambda: not source._sent_buffers)
    assert len(source._free) <= 2, "what was read is written to again"
    monkeypatch.setattr(nixl_connector, "MAX_SENT_BYTES", 2 * source._buffer_size)
    unread = Fetch(source, target, 4)
    unread.wanted()
    sent: list[list[bytes]] = []
    send = source._send
    monkeypatch.setattr(source, "_send", lambda route, frames: sent.append(frames))
    source._free.clear()
    assert [unread.give(place) for place in range(4)] == [[True], [True], [False], [False]]
    for frames in sent:
        send(source._routes[unread.handover.id].route, frames)
    assert unread.done() == [True, True, False, False], "what there was no room for is not waited for"
    assert source.stats.failed == 2


@pytest.mark.parametrize("forged", [{"address": 4096}, {"metadata": b"noise"}, {"count": 1 << 40}, {"token": 5}])
def test_a_place_that_nothing_can_be_read_from_is_said_not_to_come(nixl_pair, forged) -> None:
    source, target = nixl_pair
    fetch = Fetch(source, target, 2)
    fetch.wanted()
    send = source._send

    def forge(route, frames: list[bytes]) -> None:
        place = msgspec.msgpack.decode(frames[1], type=nixl_connector._Place)
        for name, value in forged.items():
            setattr(place, name, value)
        send(route, [frames[0], msgspec.msgpack.encode(place)])

    source._send = forge  # type: ignore[method-assign]
    fetch.give(0, 1)
    assert fetch.done() == [False, False] and target.stats.dropped == 1
    source._send = send  # type: ignore[method-assign]
    again = Fetch(source, target, 2)
    until(source.take_requests)
    again.give(0, 1)
    assert again.done() == [True, True], "the link goes on"
