"""Numbers that the processes of one server count together: each adds to a row of its own, all read the sums, and who
decides by them holds a lock meanwhile. One process alone keeps them in its memory, several in a file that all map.

    whole server │ row of the main process │ rows of API workers │ key: its budget, its requests by row │ key ...

A row is cleared when its process has died; what only ever grows stays. The lock is the file's, so that the system gives
it back for a process that dies holding it; one that is stopped there holds up others for a moment only.
Refuses to know: what is limited, who starts processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

WHOLE = ("draining", "stay", "waited")
# Refusals by reason, which only grow.
REFUSED = ("draining", "key_concurrency", "queue_full", "queue_tokens", "key_tokens", "engine")
ROW = ("waiting", "queued", "inflight", "background", "beat", "ended", *REFUSED)
BUDGET = ("level", "filled")  # of a key
LOCK_TIMEOUT_S = 0.2  # after which a decision is taken without the lock
LOCK_PAUSE_S = 0.0002  # between attempts

_AT_WHOLE = {name: at for at, name in enumerate(WHOLE)}
_IN_ROW = {name: at for at, name in enumerate(ROW)}


class SharedCounts:
    """`row`: this process's of so many `rows`. `keys`: names of the API keys, the same in all processes; a server of
    one process takes others too."""

    def __init__(self, keys: Sequence[str] = (), *, rows: int = 1, row: int = 0, file: Path | None = None):
        self.rows, self.row = rows, row
        self._start = len(WHOLE)
        self._block = len(BUDGET) + rows
        first = self._start + rows * len(ROW)
        size = first + len(keys) * self._block
        self._keys = {name: first + at * self._block for at, name in enumerate(keys)}
        self._own = [0.0] * size if file is None else []
        self._cells: list[float] | memoryview[float] = self._own
        self._lock = -1
        if file is not None:
            self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self._lock).st_size < 8 * size:
                os.pwrite(self._lock, bytes(8 * size), 0)  # not a hole: a disk that is full says so now
            self._cells = memoryview(mmap.mmap(self._lock, 8 * size)).cast("d")

    # ---- the whole server -----------------------------------------------------------------------------------

    def whole(self, name: str) -> float:
        return self._cells[_AT_WHOLE[name]]

    def set_whole(self, name: str, value: float) -> None:
        self._cells[_AT_WHOLE[name]] = value

    # ---- rows -----------------------------------------------------------------------------------------------

    def add(self, name: str, more: float) -> None:
        self._cells[self._at(self.row, name)] += more

    def put(self, name: str, value: float) -> None:
        self._cells[self._at(self.row, name)] = value

    def of_row(self, row: int, name: str) -> float:
        return self._cells[self._at(row, name)]

    def total(self, name: str) -> int:
        at, cells = self._at(0, name), self._cells
        if self.rows == 1:
            return int(cells[at])
        return int(sum(cells[at + row * len(ROW)] for row in range(self.rows)))

    def _at(self, row: int, name: str) -> int:
        return self._start + row * len(ROW) + _IN_ROW[name]

    def clear(self, row: int) -> None:
        """Its process has died: what it had under way is over."""
        for name in ROW:
            if name not in REFUSED:
                self._cells[self._at(row, name)] = 0.0
        for block in self._keys.values():
            self._cells[block + len(BUDGET) + row] = 0.0

    # ---- keys -----------------------------------------------------------------------------------------------

    def _of_key(self, key: str) -> int:
        if (found := self._keys.get(key)) is None:
            found = self._keys[key] = len(self._own)
            assert self._cells is self._own, f"key {key!r} is not one that the server was started with"
            self._own.extend([0.0] * self._block)
        return found

    def requests_of(self, key: str) -> int:
        at = self._of_key(key) + len(BUDGET)
        return int(sum(self._cells[at + row] for row in range(self.rows)))

    def add_request(self, key: str, more: int) -> None:
        self._cells[self._of_key(key) + len(BUDGET) + self.row] += more

    def budget(self, key: str) -> tuple[float, float] | None:
        """(tokens left, when that was counted); None: nothing was spent yet."""
        at = self._of_key(key)
        level, filled = self._cells[at], self._cells[at + 1]
        return (level, filled) if filled else None

    def set_budget(self, key: str, level: float, filled: float) -> None:
        at = self._of_key(key)
        self._cells[at], self._cells[at + 1] = level, filled

    def give_back(self, key: str, tokens: float) -> None:
        self._cells[self._of_key(key)] += tokens

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """What is read and written meanwhile, no other process changes between."""
        if self._lock < 0:
            yield
            return
        held = self._take_lock()
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _take_lock(self) -> bool:
        given_up = 0.0
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:  # another has it
                now = time.monotonic()
                given_up = given_up or now + LOCK_TIMEOUT_S
                if now >= given_up:
                    return False
                time.sleep(LOCK_PAUSE_S)
