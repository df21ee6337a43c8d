"""The files that a batch writes its answers to, which a server's end does not cut short for good.

Refuses to know: how lines are answered.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import IO

import msgspec

from quire.serve.core.stored_records import created, disk_full, remembered, write_all
from quire.serve.openai.batch_bodies import OwnedBatch
from quire.serve.openai.batch_lines import read_line
from quire.serve.openai.file_store import FileStore


async def unanswered(lines: AsyncIterator[bytes], done: set[str]) -> AsyncGenerator[bytes, None]:
    """Lines whose answers are not there yet."""
    async for raw in lines:
        if not done or read_line(raw, None).custom_id not in done:
            yield raw


def outputs_in(folder: Path) -> set[str]:
    """Files that batches write, be they known as files yet or not."""
    found = [remembered(path, OwnedBatch) for path in folder.glob("batch-*.json")]
    return {id for owned in found if owned for id in owned.outputs.values()}


class _Answer(msgspec.Struct):
    custom_id: str | None


class Output:
    """A file of answers, there once the first is written, or from before the server last ended."""

    def __init__(self, store: FileStore, id: str, owner: str):
        self._store, self._id, self._owner = store, id, owner
        self._target: IO[bytes] | None = None
        self._size = 0  # that is counted

    def answered(self) -> set[str]:
        """Go on behind what is there: whose answers that are. The last line is dropped if it was cut short."""
        path, whole = self._store.path(self._id), 0
        found: set[str] = set()
        if not path.exists():
            return found
        self._target = open(os.open(path, os.O_RDWR), "r+b", buffering=0)  # noqa: SIM115
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                found.add(msgspec.json.decode(line, type=_Answer).custom_id or "")
                whole += len(line)
        self._target.truncate(whole)
        self._target.seek(whole)
        self._take(whole)
        return found

    def _take(self, size: int) -> None:
        self._store.bytes.take(self._owner, size)
        self._size += size

    async def write(self, line: bytes) -> None:
        if self._target is None:
            self._store.room(self._owner, 0)
            self._target = created(self._store.path(self._id))
        self._store.room(self._owner, len(line) + 1, files=0)
        with disk_full():
            await asyncio.to_thread(write_all, self._target, line + b"\n")
        self._take(len(line) + 1)

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None
        self._take(-self._size)

    def keep(self, name: str, seconds: int | None) -> str | None:
        """Make it one of the key's files, for so many seconds; its id, if there is any."""
        if self._target is None:
            self.answered()
        written, size = self._target is not None, self._size
        self.close()
        if not written:
            return None
        return self._store.adopt(self._id, size, name, "batch_output", self._owner, seconds, anyway=True).id
