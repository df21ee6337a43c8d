"""Who waits is let in: pages, a slot and a first row for newcomers, best first, while budget, slots and memory last.

A newcomer starts on what is cached of its prompt; one whose pages are on their way (computed by somebody else, sent
for from a tier, chunks of its own) waits for them. Refuses to know: how running sequences go on, who gives way to whom.
"""

from __future__ import annotations

from collections import deque

from quire.memory.manager import Hit, KVManager
from quire.scheduling.blending import Blending
from quire.scheduling.diary import Diary
from quire.scheduling.flight import Flight
from quire.scheduling.pace import Budget
from quire.scheduling.paging import Paging, reusable
from quire.scheduling.policies import FCFS
from quire.scheduling.pressure import Pressure
from quire.scheduling.roster import Roster
from quire.scheduling.sequence import Sequence
from quire.scheduling.sessions import Sessions
from quire.types.request import Status

AT_ONCE, ENOUGH = 64, 4096  # newcomers, and tokens of theirs, while the device is idle; the others while it works


class Boarding:
    def __init__(
        self,
        roster: Roster,
        *,
        policy: FCFS,
        chunk: int,
        overlapped: bool,
        memory: KVManager,
        diary: Diary,
        paging: Paging,
        sessions: Sessions,
        pressure: Pressure,
        blending: Blending,
    ):
        """`chunk`: most tokens of one row; `overlapped`: whether plans are made while the device works."""
        self._roster = roster
        self._policy = policy
        self._chunk = chunk
        self._overlapped = overlapped
        self._memory = memory
        self._diary = diary
        self._paging = paging
        self._sessions = sessions
        self._pressure = pressure
        self._blending = blending

    def admit(
        self, flight: Flight, budget: Budget, now: float, *, idle: bool, only: list[Sequence] | None = None
    ) -> None:
        """Let waiting sequences start; `only` these, at any price. `idle`: no step is in flight."""
        roster, slots = self._roster, self._roster.slots
        if not (roster.waiting and slots and budget.fit(0) and self._policy.admits(len(roster.running))):
            return
        order = only or list(self._policy.order(roster.waiting, now))
        reserve = self._policy.reserve(order[: len(slots)])
        hurry = self._overlapped and idle and not (reserve or flight.rows)
        admitted: set[Sequence] = set()
        for seq in order:
            if not slots or not (budget.fit(0) or reserve):
                break
            if hurry and (len(admitted) >= AT_ONCE or flight.plan.tokens >= ENOUGH):
                break
            if seq.inflight or not (only or self._pressure.admits(seq)):
                continue  # preempted; its old pages are still in use, or it would only be so again
            self._memory.hash_pages(seq.table, seq.tokens, seq.request.salt)
            hit = self._memory.lookup(seq.table, reusable(seq))
            if hit.waits or self._paging.fetch(seq) or self._awaits_chunks(flight, seq):
                seq.move(Status.PENDING)
                self._diary.waits(seq)
                continue
            count = min(seq.known - hit.tokens, self._chunk, budget.fit(hit.tokens))
            if seq.memo is not None:
                count = min(count, seq.memo.room(hit.tokens, 0))
            spare = self._pressure.spare if roster.running and not only else 0
            while not (fits := self._start(flight, seq, hit, count, reserve, spare)) and self._sessions.let_go():
                hit = self._memory.lookup(seq.table, reusable(seq))
            if not fits:
                break
            admitted.add(seq)
            budget = budget.less(hit.tokens, count)
        if admitted:
            roster.waiting = deque(s for s in roster.waiting if s not in admitted)

    def _awaits_chunks(self, flight: Flight, seq: Sequence) -> bool:
        blend = seq.request.blend
        return blend is not None and self._blending.waits(flight, seq, blend, self._roster.enter_apart)

    def _start(self, flight: Flight, seq: Sequence, hit: Hit, count: int, reserve: int, spare: int) -> bool:
        """Give a newcomer pages, a slot and its first row; False if memory is short."""
        if not self._memory.fits(min(max(seq.known, reserve), seq.peak), hit, spare):
            return False
        blend = seq.request.blend
        if blend is not None:
            reserve = seq.known
        adopted = self._memory.adopt(seq.table, hit)
        extended = self._memory.extend(seq.table, hit.tokens, max(hit.tokens + count, reserve))
        if extended is None:  # enough pages, but not in one piece
            self._memory.release(seq.table, hit.tokens)
            return False
        seq.computed = seq.hit = hit.tokens
        if seq.cached < 0:
            seq.cached = hit.tokens
            self._diary.stats.cached_tokens += hit.tokens
        self._diary.started(seq, hit)
        self._paging.started(seq)
        self._pressure.started(seq)
        self._roster.run(flight, seq)
        flight.change(seq, adopted)
        flight.change(seq, extended)
        self._memory.promise(seq.table, min(seq.known, seq.peak))
        if blend is not None and self._blending.begin(flight, seq, blend, hit.tokens, count, self.add_row):
            return True
        if count:
            self.add_row(flight, seq, count)
        return True

    def seat_forks(self, flight: Flight) -> None:
        """Slots and rows for beams that forked off others, as far as there are any."""
        for seq in list(self._roster.forks):
            if not self._roster.slots:
                break
            change = self._memory.extend(seq.table, seq.computed, seq.known)
            if change is None:
                break
            del self._roster.forks[seq]
            self._roster.run(flight, seq)
            flight.tables(seq)
            flight.plan.copies += change.copies
            self.add_row(flight, seq, 1)

    def add_row(self, flight: Flight, seq: Sequence, count: int, drafts: int = 0) -> None:
        """Let a running sequence compute tokens from where it is, and draw if that completes it."""
        self._diary.row(seq, count)
        flight.row(seq, count, drafts)
        self._memory.publish(seq.table, min(seq.computed, len(seq.tokens)), seq.tokens, seq.request.salt)
        if seq.computed == seq.known and seq.draws:
            if seq.children and seq.known == seq.prompt_len:
                self._fork_children(flight, seq)
            flight.sample(seq)

    def _fork_children(self, flight: Flight, parent: Sequence) -> None:
        """The prompt is computed in this step: branches share its pages and draw from its last row."""
        for child in parent.children:
            if child.status is Status.FINISHED:
                continue
            child.cached = parent.cached
            if not self._roster.slots:
                self._roster.waiting.append(child)  # starts later, on a prefix hit
                continue
            child.table = self._memory.fork(parent.table)
            child.computed = child.hit = parent.computed
            child.inherit(parent)
            self._diary.started(child)
            self._roster.run(flight, child)
            flight.tables(child)
            flight.sample(child)
        parent.children = []
