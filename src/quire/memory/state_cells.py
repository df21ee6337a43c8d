"""Cells for the states of recurrent layers: one for each sequence, and snapshots that prefix hits start from.

    sequence ──► cell ──(a row reads it, and writes it or a fresh one)──► cell
                   └── at a page boundary: kept, named by the prefix, from then on only read

A cell that others may read (a fork, the index) is never written: the next row of whoever holds it writes a fresh one,
so that a fork or a snapshot costs no copy. A snapshot enters the index when the step that computes it has landed.
Wanted are the last page boundary of a prompt, one each `interval` tokens of it, the place where its pages are shared
but no snapshot was (others part there), and the latest boundary of an answer. When cells run out, the snapshot goes
whose uses saved least.

Refuses to know: pages, what a state is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from quire.memory.prefix import PrefixIndex
from quire.memory.ranking import Ranking
from quire.types.clock import Clock
from quire.types.kv import NULL_STATE
from quire.types.transfer import Key


class StateTrack:
    """The state of one sequence, and the snapshots of it that have no name yet."""

    __slots__ = ("cell", "kept", "latest", "promises", "since", "upto", "wanted")

    def __init__(self) -> None:
        self.cell = NULL_STATE
        self.clear()

    def clear(self) -> None:
        self.kept: list[tuple[int, int]] = []  # (tokens, cell), ascending
        self.wanted: list[int] = []  # boundaries of what it knew when it started, ascending
        self.upto = 0  # tokens it knew then
        self.since = 0  # tokens behind which its latest snapshot is
        self.latest: Key | None = None  # that of its answer
        self.promises: dict[int, Key] = {}  # by boundary


class StateCells:
    def __init__(
        self,
        cells: int,
        *,
        working: int,
        group: int,
        step: int,
        size: int,
        interval: int,
        snapshots: bool = True,
        clock: Clock | None = None,
    ):
        """`cells` counts the null cell; `working` are never taken for snapshots. Boundaries are multiples of `step`
        tokens, named as the pages of `size` tokens that end there, in the index under the number `group`."""
        self.total = cells - 1
        self.group = group
        self.index = PrefixIndex(clock)
        self._working = working
        self._snapshots = snapshots
        self._step, self._size = step, size
        self._interval = -(-interval // step) * step
        self._refs = [0] * cells
        self._blank = list(range(cells - 1, NULL_STATE, -1))
        self._idle: set[int] = set()  # snapshots that no sequence goes on from now
        self._ranking = Ranking("cost")  # all snapshots; those in use are pinned
        self.leaving: Callable[[Key, int], None] | None = None  # told of snapshots that are about to be lost
        self.saves = False  # whether new snapshots are to be saved, and those that are not yet
        self.unsaved: dict[Key, int] = {}
        self._left: list[set[int]] = [set()]  # cells that steps in flight, and the next one, read and nobody holds

    @property
    def available(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        return len(self._idle)

    # ---- cells ----------------------------------------------------------------------------------------------

    def take(self, taker: str = "") -> int | None:
        """A cell with one reference; None if all are in use."""
        cell = self._blank.pop() if self._blank else self._evict(taker)
        if cell is not None:
            self._refs[cell] = 1
        return cell

    def _evict(self, taker: str, *, settled: bool = False) -> int | None:
        """The snapshot that is worth least makes room; if `settled`, not if a step in flight reads it."""
        key = self._ranking.pop(0.0)
        if key is None:
            return None
        (cell,) = self.index.run(self.group, [key[1]])
        if settled and self._is_read(cell):
            self._ranking.add(key)
            return None
        if self.leaving is not None:
            self.leaving(key, cell)
        self.index.remove(cell, taker)
        self._idle.discard(cell)
        return cell

    def _is_read(self, cell: int) -> bool:
        return any(cell in left for left in self._left)

    def _take_settled(self, taker: str = "") -> int | None:
        """A spare cell that no step in flight reads, to be filled beside the steps."""
        if not self._spare:
            return None
        cell = next((cell for cell in reversed(self._blank) if not self._is_read(cell)), None)
        if cell is None:
            cell = self._evict(taker, settled=True)
        else:
            self._blank.remove(cell)
        if cell is not None:
            self._refs[cell] = 1
        return cell

    def launched(self) -> None:
        """A plan with the rows since the last one goes its way."""
        self._left.append(set())

    def landed(self) -> None:
        """The oldest of those steps is over."""
        del self._left[0]

    def share(self, cell: int) -> None:
        if cell != NULL_STATE:
            self._refs[cell] += 1
            self._idle.discard(cell)
            if (key := self.index.key_of(cell)) is not None:
                self._ranking.pin(key, inf)

    def release(self, cell: int) -> None:
        if cell == NULL_STATE:
            return
        self._refs[cell] -= 1
        assert self._refs[cell] >= 0, f"state cell {cell} released more often than taken"
        if not self._refs[cell]:
            if (key := self.index.key_of(cell)) is None:
                self._blank.append(cell)
            else:
                self._idle.add(cell)
                self._ranking.pin(key, 0.0)

    def _forget(self, cell: int, taker: str = "") -> None:
        if (key := self.index.key_of(cell)) is not None:
            self._ranking.remove(key)
            self.index.remove(cell, taker)
            if not self._refs[cell]:
                self._idle.discard(cell)
                self._blank.append(cell)

    # ---- prefixes -------------------------------------------------------------------------------------------

    def name(self, names: Sequence[bytes], tokens: int) -> bytes | None:
        """Of the boundary behind so many tokens; None: they are not all known."""
        at = tokens // self._size
        return names[at - 1] if at <= len(names) else None

    def deepest(self, names: Sequence[bytes], tokens: int) -> int:
        """Behind how many of the first `tokens` tokens the deepest snapshot is; 0: there is none."""
        held, group, size = self.index.holds, self.group, self._size
        boundaries = range(tokens // self._step * self._step, 0, -self._step) if len(self.index) else ()
        return next((b for b in boundaries if held((group, names[b // size - 1]))), 0)

    def promised(self, names: Sequence[bytes], after: int, limit: int) -> bool:
        """Whether a snapshot behind more than `after` and fewer than `limit` tokens is about to be computed."""
        if not self.index.promises:
            return False
        boundaries = range((after // self._step + 1) * self._step, limit, self._step)
        found = (self.name(names, tokens) for tokens in boundaries)
        return any(name is not None and self.index.promiser((self.group, name)) is not None for name in found)

    def adopt(self, track: StateTrack, cell: int, tokens: int) -> None:
        """Go on from a snapshot."""
        self.share(cell)
        track.cell, track.since = cell, tokens
        if (key := self.index.key_of(cell)) is not None:
            self._ranking.use(key, float(tokens))
            self._ranking.pin(key, inf)

    def hold(self, track: StateTrack, names: Sequence[bytes], tokens: int) -> None:
        """Keep the deepest snapshot of a prefix of `tokens` tokens, if cells can be spared."""
        boundary = self.deepest(names, tokens)
        if boundary and self._spare:
            (track.cell,) = self.index.run(self.group, [names[boundary // self._size - 1]])
            track.since = boundary
            self.share(track.cell)

    def want(self, track: StateTrack, start: int, shared: int, upto: int, names: Sequence[bytes]) -> None:
        """Choose the boundaries between `start` and `upto` tokens where snapshots are taken, and promise them; pages of
        others reach `shared`."""
        track.upto = upto
        if not self._snapshots:
            return
        step = self._step
        found = {shared // step * step, (upto - 1) // step * step}
        if self._interval:
            found.update(range((start // self._interval + 1) * self._interval, upto, self._interval))
        track.wanted = sorted(b for b in found if start < b < upto)
        named = {b: (self.group, name) for b in track.wanted if (name := self.name(names, b)) is not None}
        fresh = set(self.index.promise(named.values(), track))
        track.promises = {b: key for b, key in named.items() if key in fresh}

    def row(
        self, track: StateTrack, start: int, count: int, *, drafts: bool = False, taker: str = ""
    ) -> tuple[int, list[tuple[int, int]]]:
        """The cell that the next row reads, and where the states within and behind it go, as (tokens of the row, cell).
        With `drafts` it is not known how far it comes."""
        end, source, found = start + count, track.cell, []
        passed = [b for b in track.wanted if b <= end]
        track.wanted = track.wanted[len(passed) :]
        for boundary in (b for b in passed if start < b < end and self._spare):
            cell = self.take(taker)
            assert cell is not None, "there are cells to spare"
            track.kept.append((boundary, cell))
            found.append((boundary - start, cell))
        track.cell = self._writable(track, taker)
        if not drafts:
            self.keep(track, end, wanted=end in passed)
        kept = {tokens for tokens, _ in track.kept}
        broken = [track.promises.pop(b) for b in passed if b in track.promises and b not in kept]
        self.index.withdraw(broken, track)
        return source, [*found, (count, track.cell)]

    @property
    def _spare(self) -> bool:
        return self.available > self._working

    def _writable(self, track: StateTrack, taker: str) -> int:
        """The cell that a sequence's next state goes to: its own, if nobody else reads that."""
        cell = track.cell
        if cell != NULL_STATE and self._refs[cell] == 1 and self.index.key_of(cell) is None:
            return cell
        fresh = self.take(taker)
        if fresh is not None:
            self.release(cell)
            self._left[-1].add(cell)
            return fresh
        mine = [tokens for tokens, kept in track.kept if kept == cell]
        track.kept = [(tokens, kept) for tokens, kept in track.kept if kept != cell]
        self._refs[cell] -= len(mine)
        assert cell != NULL_STATE and self._refs[cell] == 1, "no cell for a sequence"
        self._forget(cell, taker)  # what others might have started from is worth less than going on
        return cell

    def keep(self, track: StateTrack, tokens: int, *, wanted: bool = False) -> None:
        """The state behind `tokens` tokens is in the sequence's cell: a snapshot, if it is wanted or of an answer."""
        of_answer = self._snapshots and tokens % self._step == 0 and tokens > max(track.upto, track.since)
        if (wanted or of_answer) and self._spare:
            self.share(track.cell)
            track.kept.append((tokens, track.cell))

    def publish(self, track: StateTrack, upto: int, names: Sequence[bytes]) -> None:
        """What is kept of the first `upto` tokens is computed; `names`: of its pages."""
        while track.kept and track.kept[0][0] <= upto:
            tokens, cell = track.kept.pop(0)
            track.promises.pop(tokens, None)
            if (name := self.name(names, tokens)) is not None:
                self._enter(track, (self.group, name), cell, tokens)
            self.release(cell)

    def _enter(self, track: StateTrack, key: Key, cell: int, tokens: int) -> None:
        self.index.publish(key, cell)
        if self.index.key_of(cell) != key:
            return  # another cell holds it
        self._ranking.add(key, float(tokens - track.since))
        self._ranking.pin(key, inf)
        track.since = tokens
        if self.saves and tokens <= track.upto:
            self.unsaved[key] = cell
        if tokens > track.upto:
            if track.latest is not None:
                for old in self.index.run(self.group, [track.latest[1]]):
                    if old in self._idle and not self._ranking.uses(track.latest):
                        self._forget(old)  # the answer has gone on: who continues it starts from here
            track.latest = key

    def begin_load(self, track: StateTrack, key: Key, tokens: int, taker: str) -> bool:
        """Take a cell for a snapshot that comes from elsewhere, and promise it; False if there is none."""
        cell = self._take_settled(taker)
        if cell is None:
            return False
        track.cell, track.since = cell, tokens
        if self.index.promise([key], track):
            track.promises[tokens] = key
        return True

    def loaded(self, track: StateTrack, key: Key) -> None:
        """It has come, whole."""
        self.index.publish(key, track.cell)
        if self.index.key_of(track.cell) == key:
            self._ranking.add(key, float(track.since))
            self._ranking.pin(key, inf)

    def end_load(self, track: StateTrack) -> None:
        """No more of it comes."""
        self.index.withdraw(track.promises.values(), track)
        track.promises = {}

    def to_save(self) -> list[tuple[Key, int]]:
        """Snapshots that were not saved yet and are still there, once."""
        found = [(key, cell) for key, cell in self.unsaved.items() if self.index.key_of(cell) == key]
        self.unsaved.clear()
        return found

    def idle_cells(self) -> list[int]:
        """Of snapshots that no sequence goes on from now."""
        return list(self._idle)

    def fork(self, track: StateTrack) -> StateTrack:
        """Another sequence that goes on from the same state."""
        child = StateTrack()
        child.cell, child.upto, child.since = track.cell, track.upto, track.since
        self.share(track.cell)
        return child

    def drop(self, track: StateTrack) -> None:
        """A sequence gives up its state; of its answer, only the latest snapshot is worth saving."""
        if self.saves and track.latest is not None:
            for cell in self.index.run(self.group, [track.latest[1]]):
                self.unsaved[track.latest] = cell
        for _, cell in track.kept:
            self.release(cell)
        self.release(track.cell)
        self.index.withdraw(track.promises.values(), track)
        track.cell = NULL_STATE
        track.clear()

    def drop_cached(self, keys: Iterable[Key] | None = None) -> None:
        """Drop snapshots that no sequence goes on from: those of these names, or all."""
        if keys is None:  # those in use lose their names, but stay valid for their holders
            for key in list(self._ranking):
                self._ranking.remove(key)
            self._blank += self._idle
            self._idle.clear()
            self.unsaved.clear()
            self.index.clear()
            return
        for cell in [cell for _, name in keys for cell in self.index.run(self.group, [name])]:
            if cell in self._idle:
                self._forget(cell)

    def check(self, tracks: Sequence[StateTrack]) -> None:
        """Every reference is held by exactly one track."""
        self.index.check()
        held: dict[int, int] = {}
        for track in tracks:
            for cell in (track.cell, *(kept for _, kept in track.kept)):
                if cell != NULL_STATE:
                    held[cell] = held.get(cell, 0) + 1
        for cell in range(1, self.total + 1):
            assert self._refs[cell] == held.get(cell, 0), f"state cell {cell}: {self._refs[cell]} references"
            named = self.index.key_of(cell) is not None
            free = (cell in self._blank, cell in self._idle)
            wanted = (False, False) if self._refs[cell] else (not named, named)
            assert free == wanted, f"state cell {cell} is lost, or free twice"
        assert len(set(self._blank)) == len(self._blank) and self._refs[NULL_STATE] == 0
        assert len(self._ranking) == len(self.index), "snapshots are not those that are ranked"
