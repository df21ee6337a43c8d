"""Flow control between engines: how much may be on its way to peers, of what they have not read yet.

One window for all peers, in bytes and in messages; one that has read everything may always have one message. Refuses to
know: what is sent, how it travels.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

MAX_UNREAD_BYTES = 1 << 30
MAX_UNREAD_MESSAGES = 96
MAX_COUNTED_PEERS = 256
PROBE_S = 1.0  # of waiting, after which it is asked whether the peer is still there


class PeerState(NamedTuple):
    """What a window asks while it waits."""

    is_wanted: Callable[[], bool]  # whether the message is
    active_peers: Callable[[], Collection[Hashable]]  # those whose messages count
    probe: Callable[[], None]  # finds out that the peer is gone: then the message is wanted no more


class SendWindow:
    def __init__(self, lock: threading.RLock):
        """`lock`: held by whoever changes what the window asks about."""
        self._changed = threading.Condition(lock)
        self.unread: dict[Hashable, deque[int]] = {}  # bytes of each message, by peer

    def wait(self, peer: Hashable, size: int, timeout: float, state: PeerState) -> bool:
        """Until a message of this size may go to a peer; then it counts. False: it is wanted no more, or the peer has
        read nothing for so many seconds."""
        with self._changed:
            before, since = len(self.unread.get(peer, ())), time.monotonic()
            while state.is_wanted() and not self._fits(peer, size, state.active_peers()):
                if (count := len(self.unread[peer])) < before:
                    before, since = count, time.monotonic()
                left = timeout - (time.monotonic() - since)
                if left <= 0:
                    return False
                if not self._changed.wait(min(left, PROBE_S)):
                    state.probe()
            if not state.is_wanted():
                return False
            self.unread.setdefault(peer, deque()).append(size)
            if len(self.unread) > MAX_COUNTED_PEERS:  # the first is most likely gone
                del self.unread[next(iter(self.unread))]
        return True

    def _fits(self, peer: Hashable, size: int, reading: Collection[Hashable]) -> bool:
        sizes = [one for other, unread in self.unread.items() if other in reading for one in unread]
        few = len(sizes) < MAX_UNREAD_MESSAGES and sum(sizes) + size <= MAX_UNREAD_BYTES
        return few or not self.unread.get(peer)

    def acknowledged(self, peer: Hashable) -> None:
        """It has read the oldest message."""
        self._take(peer, deque.popleft)

    def withdraw(self, peer: Hashable) -> None:
        """The latest message was not sent after all."""
        self._take(peer, deque.pop)

    def _take(self, peer: Hashable, end: Callable[[deque[int]], int]) -> None:
        with self._changed:
            if unread := self.unread.get(peer):
                end(unread)
                if not unread:
                    del self.unread[peer]
            self._changed.notify_all()

    def forget(self, peer: Hashable) -> None:
        with self._changed:
            self.unread.pop(peer, None)
            self._changed.notify_all()

    def wake(self) -> None:
        """What is wanted has changed."""
        with self._changed:
            self._changed.notify_all()
