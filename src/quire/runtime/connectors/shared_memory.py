"""The shared-memory connector, for engines on one machine: pages lie in memory files, messages go over TCP.

    writer: memfd ──(pid, descriptor, name)──► reader: /proc/PID/fd/N ──► pages read ──► truncated: its memory is free

A message's pages are one anonymous file (memfd) of the writer's process: it has no place in a file system that could be
full, only processes of this user can open it, and it ends with its writer, however that ends. Refuses to know: what
pages are for.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.runtime.connectors.page_connector import MAX_KEYS, Buffer, signed_bytes
from quire.runtime.connectors.tcp import TcpConnector
from quire.runtime.tiers.signed_page import SignedPage
from quire.types.errors import ConfigError

MAX_UNREAD_BYTES = 1 << 30  # of this writer's files that are not read yet: the oldest goes first
MAX_UNREAD_FILES = 128
_PLACE = re.compile(r"([0-9]{1,10})/([0-9]{1,10})/(quire-pages-[0-9a-f]{32})")


class SharedMemoryConnector(TcpConnector):
    def __init__(self, *args: Any, **kwargs: Any):
        if not hasattr(os, "memfd_create"):
            raise ConfigError("kv_connector shared-memory needs the memory files of Linux (memfd_create); use tcp")
        self._files: dict[int, int] = {}  # descriptors and sizes, the oldest first
        self._files_lock = threading.Lock()
        self._read = np.empty(0, dtype=np.uint8)  # kept: memory that is new costs more than what is read into it
        super().__init__(*args, **kwargs)

    def close(self) -> None:
        super().close()
        with self._files_lock:
            for descriptor in self._files:
                os.close(descriptor)
            self._files.clear()

    def _pack(self, handover: str, signed: list[SignedPage]) -> list[bytes]:
        name = f"quire-pages-{secrets.token_hex(16)}"
        with self._files_lock:
            self._release()
            descriptor = os.memfd_create(name)
            try:
                with open(descriptor, "wb", closefd=False) as out:
                    for page in signed:
                        out.writelines(page)
            except OSError:
                os.close(descriptor)
                raise
            self._files[descriptor] = sum(signed_bytes(page) for page in signed)
        return [f"{os.getpid()}/{descriptor}/{name}".encode(), str(len(signed)).encode()]

    def _release(self) -> None:
        """Close files that were read, and the oldest of too many that were not."""
        for descriptor in [one for one in self._files if not os.fstat(one).st_size]:
            self._close_file(descriptor)
        while len(self._files) >= MAX_UNREAD_FILES or sum(self._files.values()) > MAX_UNREAD_BYTES:
            self._close_file(next(iter(self._files)))

    def _close_file(self, descriptor: int) -> None:
        del self._files[descriptor]
        os.close(descriptor)

    def _unpack(self, parts: Sequence[bytes]) -> Sequence[Buffer]:
        place, count = _PLACE.fullmatch(parts[0].decode("ascii")), int(parts[1])
        if place is None or not 0 < count <= MAX_KEYS:
            raise ValueError("this names no pages")
        descriptor = os.open(f"/proc/{place[1]}/fd/{place[2]}", os.O_RDWR | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            size, odd = divmod(os.fstat(descriptor).st_size, count)  # pages, or parts of them
            named = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{place[3]} ")
            if not named or odd or not size:
                raise ValueError("the file there is another one by now")
            if len(self._read) < count * size:
                self._read = np.empty(count * size, dtype=np.uint8)
            content = self._read[: count * size].data
            if file.readinto(content) != len(content):
                raise ValueError("the file there ends early")
            os.ftruncate(descriptor, 0)
            return [content[start : start + size] for start in range(0, len(content), size)]
