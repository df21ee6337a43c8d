"""The shared-memory connector, for engines on one machine: pages lie in memory files, messages go over TCP.

A message's pages are one file of the memory file system, of this user only and with a name nobody can guess. Whoever
reads it removes it; what was never read, its writer removes. Refuses to know: what pages are for.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.runtime.connectors.page_connector import MAX_KEYS
from quire.runtime.connectors.tcp import TcpConnector
from quire.types.errors import ConfigError

FOLDER = Path("/dev/shm")
MAX_UNREAD_BYTES = 1 << 30  # of this writer's files that may lie there: the oldest goes first
_NAME = re.compile(r"quire-pages-[0-9a-f]{32}")


class SharedMemoryConnector(TcpConnector):
    def __init__(self, *args: Any, **kwargs: Any):
        if not FOLDER.is_dir():
            raise ConfigError(f"kv_connector shared-memory needs {FOLDER}; use tcp")
        self._written: dict[str, int] = {}  # file names and sizes
        super().__init__(*args, **kwargs)

    def close(self) -> None:
        super().close()
        for name in self._written:
            (FOLDER / name).unlink(missing_ok=True)

    def _pack(self, signed: list[bytes]) -> list[bytes]:
        name = f"quire-pages-{secrets.token_hex(16)}"
        descriptor = os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as out:
            for page in signed:
                out.write(page)
        self._written[name] = sum(map(len, signed))
        while sum(self._written.values()) > MAX_UNREAD_BYTES:
            oldest = next(iter(self._written))
            del self._written[oldest]
            (FOLDER / oldest).unlink(missing_ok=True)
        return [name.encode(), str(len(signed)).encode()]

    def _unpack(self, parts: Sequence[bytes]) -> Sequence[bytes]:
        name, count = parts[0].decode("ascii"), int(parts[1])
        if not _NAME.fullmatch(name) or not 0 < count <= MAX_KEYS:
            raise ValueError("this names no pages")
        descriptor = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            with contextlib.suppress(OSError):
                (FOLDER / name).unlink()
            found, size = os.fstat(descriptor), self._signer.page_bytes + self._signer.overhead
            if found.st_uid != os.getuid() or found.st_size != count * size:
                raise ValueError("these are not the pages")
            return [file.read(size) for _ in range(count)]
