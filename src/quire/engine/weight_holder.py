"""Weights that outlast their engine: an engine that restarts, or a model that returns, maps them instead of loading.

    engine ──(descriptors of its weights)──► holder ──(the same descriptors)──► the next engine

The API process holds them, which is small and never imports torch. What it has are descriptors of memory files, or of a
GPU's memory; it maps none of them. They end with it, however it ends, and the memory with the last engine that maps it.
Refuses to know: models, devices, what is in the memory.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass

import msgspec

from quire.types.errors import ConfigError
from quire.types.holder_messages import (
    Drop,
    Find,
    Holding,
    Keep,
    ToHolder,
    close_all,
    receive_message,
    send_message,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    bytes: int
    descriptors: list[int]


class WeightHolder:
    """Holds up to `limit` bytes; of more, those go that were not asked for for longest."""

    def __init__(self, limit: int):
        if not hasattr(os, "memfd_create"):
            raise ConfigError("hold_weights needs the memory files of Linux (memfd_create)")
        self._limit = limit
        self._held: dict[str, _Held] = {}  # by identity, the latest used last
        self._links: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()

    def connect(self) -> socket.socket:
        """The end of a link for an engine to inherit; whoever starts it closes it here."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thread = threading.Thread(target=self._serve, args=(own,), name="quire-weights", daemon=True)
        with self._lock:
            self._links[own] = thread
        thread.start()
        return other

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(held.bytes for held in self._held.values())

    def _serve(self, link: socket.socket) -> None:
        """Until the engine is gone."""
        try:
            while True:
                message, descriptors = receive_message(link, ToHolder)
                with self._lock:
                    self._answer(link, message, descriptors)
        except (EOFError, ConnectionError):
            pass
        except (OSError, msgspec.DecodeError) as error:
            log.warning("weights of an engine are not held: %s", error)
        finally:
            with self._lock:
                self._links.pop(link, None)
                link.close()

    def _answer(self, link: socket.socket, message: ToHolder, descriptors: list[int]) -> None:
        identity = message.identity
        found: list[int] = []
        if not isinstance(message, Keep):
            close_all(descriptors)  # none belong to it
        match message:
            case Find():
                if identity in self._held:
                    self._held[identity] = self._held.pop(identity)
                    found = self._held[identity].descriptors
            case Keep(bytes=size):
                self._drop(identity)
                if size <= self._limit:
                    self._make_room(size)
                    self._held[identity] = _Held(size, descriptors)
                    log.info("weights are held: %.2f GiB", size / (1 << 30))
                else:
                    close_all(descriptors)
            case Drop():
                self._drop(identity)
        send_message(link, Holding(identity in self._held, self._limit), found)

    def _make_room(self, size: int) -> None:
        while self._held and sum(held.bytes for held in self._held.values()) + size > self._limit:
            self._drop(next(iter(self._held)))

    def _drop(self, identity: str) -> None:
        if (held := self._held.pop(identity, None)) is not None:
            close_all(held.descriptors)
            log.info("weights are no longer held: %.2f GiB", held.bytes / (1 << 30))

    def close(self) -> None:
        """Hold nothing any more; engines go on without."""
        with self._lock:
            self._limit = 0
            for identity in list(self._held):
                self._drop(identity)
            links = dict(self._links)
            for link in links:
                link.shutdown(socket.SHUT_RDWR)  # its thread ends, and closes it
        for thread in links.values():
            thread.join()
