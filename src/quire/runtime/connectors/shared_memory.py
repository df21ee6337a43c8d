"""The shared-memory connector, for engines on one machine: pages lie in memory files, messages go over TCP.

    writer: memfd ──(pid, descriptor, name)──► reader: /proc/PID/fd/N ──► pages read ──► marked: it is written to again

A message's pages are in one anonymous file (memfd) of the writer's process: it has no place in a file system that could
be full, only processes of this user can open it, and it ends with its writer, however that ends. What was read is
written to again, for memory that is new costs ten times the copy. Refuses to know: what pages are for.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.runtime.connectors import send_window
from quire.runtime.connectors.page_connector import MAX_KEYS, MAX_TIMEOUT_S, Buffer, signed_bytes
from quire.runtime.connectors.tcp import TcpConnector
from quire.runtime.tiers.signed_page import SignedPage
from quire.types.errors import ConfigError

MAX_FILE_BYTES = send_window.MAX_UNREAD_BYTES * 5 // 4  # of files that are not read yet: the oldest goes first
MAX_UNREAD_FILES = 256
FILE_BYTES = 32 << 20  # of pages in one file, or one page: enough for several cores to copy
MAX_KEPT_BYTES = 8 * FILE_BYTES  # of files that were read
MAX_KEPT_FILES = 32
MAX_WASTE = 4  # times what is written, that a file may have
_PLACE = re.compile(r"([0-9]{1,10})/([0-9]{1,10})/(quire-pages-[0-9a-f]{32})")


class MemoryFile:
    """Pages, and a last byte in which the reader says that it has read them."""

    def __init__(self, size: int):
        self.written = 0.0  # when
        self.name = f"quire-pages-{secrets.token_hex(16)}"
        self.descriptor = os.memfd_create(self.name)
        try:
            os.posix_fallocate(self.descriptor, 0, size + 1)  # else a lack of memory would be a fault
            self.content = np.frombuffer(mmap.mmap(self.descriptor, size + 1), np.uint8)
        except (OSError, ValueError):
            os.close(self.descriptor)
            raise

    @property
    def size(self) -> int:
        return len(self.content) - 1

    @property
    def is_read(self) -> bool:
        return bool(self.content[-1])

    def write(self, page: SignedPage, start: int) -> None:
        for part in page:
            self.content[start : start + len(part)] = np.frombuffer(part, np.uint8)
            start += len(part)

    def close(self) -> None:
        del self.content  # its mapping goes, which has a descriptor too
        os.close(self.descriptor)


class SharedMemoryConnector(TcpConnector):
    def __init__(self, *args: Any, **kwargs: Any):
        if not hasattr(os, "memfd_create"):
            raise ConfigError("kv_connector shared-memory needs the memory files of Linux (memfd_create); use tcp")
        self._unread_files: list[MemoryFile] = []  # the oldest first
        self._read_files: list[MemoryFile] = []
        self._files_lock = threading.Lock()
        self._read = np.empty(0, dtype=np.uint8)  # kept: memory that is new costs more than what is read into it
        super().__init__(*args, **kwargs)

    def close(self) -> None:
        super().close()
        with self._files_lock:
            for file in self._unread_files + self._read_files:
                file.close()
            self._unread_files, self._read_files = [], []

    @property
    def _batch_bytes(self) -> int:
        return FILE_BYTES

    def _pack(self, handover: str, signed: list[SignedPage]) -> list[bytes]:
        size = signed_bytes(signed[0])  # as of all others
        with self._files_lock:
            self._sort()
            file = self._take_file(len(signed) * size)
            file.written = self._clock()
            file.content[-1] = 0
            self._unread_files.append(file)
            self._each(lambda one: file.write(one[1], one[0] * size), list(enumerate(signed)))
        place = f"{os.getpid()}/{file.descriptor}/{file.name}"
        return [place.encode(), str(len(signed)).encode(), str(size).encode()]

    def _sort(self) -> None:
        """Keep some of those that were read, and close those that nobody will read, and the oldest of too many."""
        self._read_files += [file for file in self._unread_files if file.is_read]
        self._unread_files = [file for file in self._unread_files if not file.is_read]
        while _bytes(self._read_files) > MAX_KEPT_BYTES or len(self._read_files) > MAX_KEPT_FILES:
            self._read_files.pop(0).close()
        while (
            len(self._unread_files) >= MAX_UNREAD_FILES
            or _bytes(self._unread_files) > MAX_FILE_BYTES
            or (self._unread_files and self._clock() - self._unread_files[0].written > MAX_TIMEOUT_S)
        ):
            self._unread_files.pop(0).close()

    def _advance(self) -> int:
        if self._files_lock.acquire(blocking=False):  # else they are being sorted
            try:
                self._sort()
            finally:
                self._files_lock.release()
        return super()._advance()

    def _take_file(self, size: int) -> MemoryFile:
        fitting = [file for file in self._read_files if size <= file.size <= MAX_WASTE * size]
        if not fitting:
            return MemoryFile(size)
        file = min(fitting, key=lambda one: one.size)
        self._read_files.remove(file)
        return file

    def _unpack(self, parts: Sequence[bytes]) -> Sequence[Buffer]:
        place, count, size = _PLACE.fullmatch(parts[0].decode("ascii")), int(parts[1]), int(parts[2])
        if place is None or not (0 < count <= MAX_KEYS and size > 0):
            raise ValueError("this names no pages")
        if count * size > max(FILE_BYTES, self._signer.page_bytes) + count * (self._signer.overhead + 1):
            raise ValueError("this names more than a message has")
        descriptor = os.open(f"/proc/{place[1]}/fd/{place[2]}", os.O_RDWR | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0):
            end = os.fstat(descriptor).st_size - 1
            named = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{place[3]} ")
            if not named or count * size > end:
                raise ValueError("the file there is another one by now")
            if len(self._read) < count * size:
                self._read = np.empty(count * size, dtype=np.uint8)
            pages = [self._read[start : start + size].data for start in range(0, count * size, size)]
            read = self._each(lambda one: os.preadv(descriptor, [one[1]], one[0] * size), list(enumerate(pages)))
            if any(found != size for found in read):
                raise ValueError("the file there ends early")
            os.pwrite(descriptor, b"\1", end)
            return pages


def _bytes(files: list[MemoryFile]) -> int:
    return sum(file.size for file in files)
