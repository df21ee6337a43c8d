"""A folder that one server keeps things in: records that only its user may read, written whole or not at all; room
that keys share; what a server that was killed left behind.

Refuses to know: what the records say.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from quire.types.errors import ConfigError, QuireError

S = TypeVar("S", bound=msgspec.Struct)

logger = logging.getLogger("quire.serve")

LOCK = ".lock"  # held while a server uses the folder
PREFIX = "quire-files-"  # of folders that go with their server
UNLOCKED = 3600.0  # seconds after which such a folder without a lock counts as left behind


class DiskFullError(QuireError):
    status = 507
    code = "disk_full"

    def __init__(self) -> None:
        super().__init__("the server's disk is full; nothing was kept of this, try again when there is room")


@contextmanager
def disk_full() -> Iterator[None]:
    """Where a full disk, or a quota, is met it is said to be that."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            logger.warning("%s", error)
            raise DiskFullError from None
        raise


def created(path: Path, buffering: int = 0) -> IO[bytes]:
    """A new file that nobody else may read; unless it is buffered, what is written is written."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b", buffering)


def write_record(path: Path, record: bytes) -> None:
    """Replace a record by another, or leave it as it is."""
    fresh = path.with_suffix(".tmp")
    fresh.unlink(missing_ok=True)
    try:
        with created(fresh) as target, disk_full():
            write_all(target, record)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def write_all(target: IO[bytes], data: bytes) -> None:
    """All of it, or none: what a full disk took of it is taken back."""
    start, view = target.tell(), memoryview(data)
    try:
        while view:
            view = view[target.write(view) :]
    except OSError:
        target.truncate(start)
        target.seek(start)
        raise


def remembered(path: Path, kind: type[S]) -> S | None:
    """What was written down before the server last ended; None, and a word in the log, if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError:
        logger.warning("%s is damaged and left alone", path)
        return None


class Shares:
    """Who holds how much of what there is `most` of. Beside other keys, one may hold as much as it leaves: half of what
    the others do not hold. So there is always room for the next."""

    def __init__(self, most: int, shared: bool):
        self.most = most
        self.shared = shared
        self.held: Counter[str] = Counter()
        self.total = 0

    def fits(self, owner: str, size: int) -> bool:
        if not self.shared:
            return self.total + size <= self.most
        mine = self.held[owner]
        return mine + size <= (self.most - (self.total - mine)) // 2

    def take(self, owner: str, size: int) -> None:
        self.held[owner] += size
        self.total += size
        if not self.held[owner]:
            del self.held[owner]


def open_folder(folder: Path) -> IO[bytes]:
    """Make the folder this server's own for as long as what is returned is open."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        logger.warning("%s holds what clients send, and others on this machine may look into it; chmod 700 it", folder)
    lock = open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"another server keeps its files in {folder}; give this one a --files of its own") from None
    return lock


def sweep_temporary(parent: Path | None = None) -> None:
    """Remove folders of servers that went without doing so."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid() or not folder.is_dir():
                continue
            if not (folder / LOCK).exists():
                if time.time() - folder.stat().st_mtime > UNLOCKED:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with open_folder(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ConfigError):  # it is in use, or goes at this moment
            continue
