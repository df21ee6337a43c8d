"""The disk tier: one signed file a page, in a directory that one engine at a time uses and that outlives it.

    DIR/secret                    32 random bytes, for this user only: names and checksums are keyed with them
    DIR/lock                      held while an engine runs
    DIR/<namespace>/ab/<name>     pages of one model and layout; the name is the key's

A file appears whole or not at all (written beside, then renamed). Files that are damaged, cut short, swapped or of
another model fail verification and are a miss. Refuses to know: which page is worth keeping.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.runtime.tiers.signed_page import PageSigner
from quire.runtime.tiers.worker_thread import ThreadedTier
from quire.types.errors import ConfigError
from quire.types.transfer import DISK, Bytes, Key

SECRET_BYTES = 32
PARTIAL_SUFFIX = ".part"


class DiskFolder:
    """The directory itself: claimed for this engine, with its secret."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use {path} for KV pages: {error}; name a directory you may write to") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"another engine uses {path} for KV pages; give each its own --kv-disk") from None

    def secret(self, wanted: bytes = b"") -> bytes:
        """What names and checksums are keyed with; `wanted` where others use it too, else kept from start to start."""
        file = self.path / "secret"
        with contextlib.suppress(FileNotFoundError):
            found = file.read_bytes()
            if len(found) == SECRET_BYTES and wanted in (b"", found):
                return found
        made = wanted or secrets.token_bytes(SECRET_BYTES)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(made)
            os.fsync(out.fileno())
        return made

    def release(self) -> None:
        os.close(self._lock)


class DiskTier(ThreadedTier):
    name = DISK
    separate_reader = True

    def __init__(
        self, folder: DiskFolder, signer: PageSigner, size: int, signal: threading.Event, *, fsync: bool = False
    ):
        self._folder = folder
        self._signer = signer
        self._fsync = fsync
        self._root = folder.path / signer.namespace
        self._root.mkdir(exist_ok=True)
        # Whole blocks: what a file of this size takes.
        self._file = -(-(signer.page_bytes + signer.overhead) // 4096) * 4096
        self.pages = size // self._file
        if self.pages < 1:
            raise ConfigError(f"--kv-disk {size} bytes is less than one page of {self._file} bytes; allow more")
        self._clean(size)
        super().__init__(signal)

    def scan(self) -> list[Key]:
        """Keys by when their files were last used; those beyond the allowed size are removed."""
        found: list[tuple[float, Key, Path]] = []
        for file in self._files(self._root):
            key = _key(file.name)
            if key is None:
                file.unlink(missing_ok=True)
            else:
                found.append((file.stat().st_mtime, key, file))
        found.sort(key=lambda entry: entry[0])
        for _, _, file in found[: -self.pages]:
            file.unlink(missing_ok=True)
        return [key for _, key, _ in found[-self.pages :]]

    def close(self) -> None:
        super().close()
        self._folder.release()

    def _clean(self, size: int) -> None:
        """Remove what a crash left half-written, and what engines of other models left if all together is too much."""
        for file in self._files(self._root):
            if file.name.endswith(PARTIAL_SUFFIX):
                file.unlink(missing_ok=True)
        others = [d for d in self._folder.path.iterdir() if d.is_dir() and d != self._root and len(d.name) == 32]
        others.sort(key=lambda d: d.stat().st_mtime)
        taken = {d: sum(f.stat().st_size for f in self._files(d)) for d in [*others, self._root]}
        for other in others:
            if sum(taken.values()) > size:
                shutil.rmtree(other, ignore_errors=True)
                del taken[other]

    def _files(self, root: Path) -> Iterator[Path]:
        for part in sorted(root.iterdir()):
            if part.is_dir():
                yield from part.iterdir()

    def _path(self, key: Key) -> Path:
        group, name = key
        return self._root / name[:1].hex() / f"{name.hex()}-{group}"

    def _put(self, keys: list[Key], pages: Sequence[Bytes]) -> list[bool]:
        return [self._put_one(key, page) for key, page in zip(keys, pages, strict=True)]

    def _put_one(self, key: Key, page: Bytes) -> bool:
        path = self._path(key)
        part = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            path.parent.mkdir(exist_ok=True)
            with open(part, "wb") as out:
                out.writelines(self._signer.sign(key, page))
                if self._fsync:
                    out.flush()
                    os.fsync(out.fileno())
            os.replace(part, path)
            if self._fsync:
                _sync_directory(path.parent)
        except OSError as error:
            part.unlink(missing_ok=True)
            self._warn(error)
            return False
        return True

    def _get(self, keys: list[Key], into: Sequence[Bytes]) -> list[bool]:
        return [self._get_one(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def _get_one(self, key: Key, into: Bytes) -> bool:
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                data = file.read(self._file + 1)
            os.utime(path)  # its last use, for the next start
        except OSError:
            return False
        return self._signer.verify(key, data, into)

    def _find(self, keys: list[Key]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def _drop(self, keys: list[Key]) -> list[bool]:
        return [self._drop_one(key) for key in keys]

    def _drop_one(self, key: Key) -> bool:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True


def _key(name: str) -> Key | None:
    digest, _, group = name.partition("-")
    try:
        return int(group), bytes.fromhex(digest)
    except ValueError:
        return None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
