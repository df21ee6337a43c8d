"""Tier prefetch: pages of waiting sequences are loaded from the tiers below the device, or come from the engine that
hands them over, before their turn.

    waiting ──► part of its prefix is in a tier ──► landing: device pages held, filled while others run ──► starts

A landing holds its pages (and those before them that were on the device) until its sequence starts, or is gone and
the transfers have ended. When memory is short, landings that no sequence has started from let go: their content
stays cached. Refuses to know: who runs next, how bytes move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from quire.memory.manager import Hit, KVManager, PageTable
from quire.memory.tiers import ELSEWHERE, Directory
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.scheduling.waiting_queue import WaitingQueue
from quire.types.errors import ConfigError
from quire.types.events import TierStats
from quire.types.handover import Handover
from quire.types.kv import NULL_PAGE
from quire.types.plan import StepResult
from quire.types.request import FinishReason
from quire.types.transfer import DEVICE, PEER, Key, TransferDone

MAX_PREFETCHED = 64  # waiting sequences whose pages are loaded before their turn
MAX_KEYS_ASKED = 1024  # of a shared tier at a time


class Landing:
    """Device pages that are being filled for one sequence."""

    def __init__(self, owner: Sequence, table: PageTable):
        self.owner: Sequence | None = owner
        self.table = table
        self.moving: set[int] = set()
        self.places: dict[Key, tuple[int, bytes, list[int]]] = {}  # key → page, name of the one before, tokens
        self.snapshot: Key | None = None  # that is being loaded into the table's cell
        self.parts = 0  # of it, not there yet
        self.tokens: dict[str, int] = {}  # delivered so far, by tier
        self.seconds = 0.0


class TierPrefetch(SchedulingFeature):
    def __init__(
        self,
        memory: KVManager,
        directory: Directory,
        timeline: TimelineRecorder,
        waiting: WaitingQueue,
        spare: Callable[[], int],
        preempt: str = "auto",
    ):
        """`spare`: how many device pages loads ahead of admission leave free."""
        if directory.tiers and memory.contiguous:  # a policy of the operator's own
            raise ConfigError("this policy reserves contiguous memory and has no pages to move; drop the KV tiers")
        self.directory = directory
        self._timeline = timeline
        self._waiting = waiting
        self._spare = spare
        self._memory = memory
        self._mode = preempt
        self._tiered = bool(directory.tiers) and memory.prefix_cache
        self._sizes = [group.tokens_per_page for group in memory.layout.groups]
        self._landings: dict[Landing, None] = {}
        self._of: dict[Sequence, Landing] = {}
        self._transfers: dict[int, Landing] = {}
        self._asking: dict[int, Sequence] = {}
        self._asked: set[Sequence] = set()  # that a shared tier has answered, or is being asked for
        self._looked: set[Sequence] = set()
        self._handed_over: set[Sequence] = set()  # whose source was asked for their pages: it is so once
        if self._tiered:
            memory.on_eviction(directory.evict)
        if self._tiered and memory.states is not None:
            memory.states.leaving, memory.states.saves = directory.evict_state, directory.kept

    @property
    def _on(self) -> bool:
        return self._tiered or (self.directory.peer is not None and self._memory.prefix_cache)

    @property
    def moving(self) -> bool:
        """Whether a sequence waits for a transfer."""
        return bool(self._transfers or self._asking)

    @property
    def busy(self) -> bool:
        """Whether there is work left even if no request is."""
        return self.directory.queued or any(landing.owner is None for landing in self._landings)

    def tables(self) -> list[PageTable]:
        return [landing.table for landing in self._landings]

    # ---- towards the device ---------------------------------------------------------------------------------

    def contribute(self, builder: PlanBuilder) -> None:
        """Send for pages of those who wait, before it is their turn; together at most a quarter of the device."""
        if not self._on or not self._waiting:
            return
        pool, spare = self._memory.pool, self._spare()
        for seq in self._waiting.first(MAX_PREFETCHED):
            if seq in self._looked or seq.inflight:
                continue
            held = sum(len(landing.places) for landing in self._landings)
            room = min(pool.available - spare, pool.total // 4 - held)
            if room <= 0:
                return
            self._memory.hash_pages(seq.table, seq.tokens, seq.request.salt)
            if not self._memory.lookup(seq.table, seq.reusable).waits:
                self._looked.add(seq)
                self.fetch(seq, room)

    def holds(self, seq: Sequence, builder: PlanBuilder) -> bool:
        return self._on and self.fetch(seq)

    def fetch(self, seq: Sequence, room: int | None = None) -> bool:
        """Whether pages of the sequence, or news of them, are on their way: begins to send for them if that pays."""
        landing = self._of.get(seq)
        if seq in self._asking.values() or (landing is not None and landing.moving):
            return True
        handover = self._handover(seq)
        run = partial(self.directory.run, peer=handover is not None)
        tokens, pages = self._memory.longest(seq.table, seq.reusable, run)
        if handover is None and self._ask(seq, tokens):
            return True
        missing = [(g, i) for g, run in enumerate(pages) for i, page in enumerate(run) if page == ELSEWHERE]
        snapshot = self._snapshot(seq, tokens)
        if not missing and snapshot is None:
            return False
        if room is not None and len(missing) > room:
            return False
        if handover is None and not self._pays(seq, tokens, missing, snapshot):
            return False
        return self._land(seq, tokens, pages, missing, snapshot)

    def _handover(self, seq: Sequence) -> Handover | None:
        """How another engine gives the sequence's pages, unless that was tried. Snapshots are not handed over."""
        handover, states = seq.request.handover, self._memory.states
        if handover is None or not handover.source or self.directory.peer is None or states is not None:
            return None
        return None if seq in self._handed_over else handover

    def _snapshot(self, seq: Sequence, tokens: int) -> Key | None:
        """The snapshot behind so many tokens, if it is in a tier and not on the device."""
        states = self._memory.states
        name = states.name(seq.table.hashes[0], tokens) if states is not None and tokens else None
        if states is None or name is None or self.directory.run(states.group, [name]) != [ELSEWHERE]:
            return None
        return states.group, name

    def _ask(self, seq: Sequence, tokens: int) -> bool:
        """Ask a tier that others fill too what it has beyond the `tokens` that are known to be somewhere, once."""
        shared = [tier for tier in self.directory.tiers if not tier.spec.pages]
        if not shared or seq in self._asked:
            return False
        self._asked.add(seq)
        end = seq.reusable - 1
        keys = [(g, n) for g, size in enumerate(self._sizes) for n in seq.table.hashes[g][tokens // size : end // size]]
        if not keys:
            return False
        if (states := self._memory.states) is not None:  # of each snapshot, the first page
            step = self._memory.layout.alignment
            named = (states.name(seq.table.hashes[0], b) for b in range(end // step * step, 0, -step))
            first = [(states.group, name) for name in named if name is not None]
            keys = first[: MAX_KEYS_ASKED // 2] + keys[: MAX_KEYS_ASKED // 2]
        self._asking[self.directory.find(shared[0], keys[:MAX_KEYS_ASKED])] = seq
        return True

    def _pays(self, seq: Sequence, tokens: int, missing: list[tuple[int, int]], snapshot: Key | None) -> bool:
        """Whether loading is quicker than computing, as far as either was measured."""
        costs = self.directory.costs
        here = min((i * self._sizes[g] for g, i in missing), default=tokens)
        if snapshot is not None:  # without it, pages serve only as far as another one does
            here = min(here, self._memory.lookup(seq.table, seq.reusable).tokens)
        compute = costs.compute(tokens - here)
        keys = [(g, seq.table.hashes[g][i]) for g, i in missing]
        tiers = [tier for key in keys if (tier := self.directory.locate(key))]
        if snapshot is not None:
            tiers += self.directory.locate_state(snapshot[1]) or []
        ways = Counter(tier.name for tier in tiers)
        load = sum(costs.move(name, DEVICE, count) or 0.0 for name, count in ways.items())
        if compute is None or load <= compute:
            return True
        for name in ways:
            costs.decay(name, DEVICE)
        return False

    def _land(
        self,
        seq: Sequence,
        tokens: int,
        pages: list[list[int]],
        missing: list[tuple[int, int]],
        snapshot: Key | None,
    ) -> bool:
        """Take device pages and begin to fill them."""
        names = seq.table.hashes
        landing = Landing(seq, PageTable(len(self._sizes)))
        keys = [(g, names[g][i]) for g, i in missing]
        parts = self.directory.state_keys(snapshot[1]) if snapshot is not None else []
        handover = self._handover(seq)
        peer = self.directory.peer if handover is not None else None
        sources = [self.directory.locate(key) or peer for key in keys]  # before making room moves anything
        if snapshot is not None:
            sources += self.directory.locate_state(snapshot[1]) or []
        if not self._hold_state(landing, seq, tokens, snapshot):
            return False
        here = [page for run in pages for page in run if page != ELSEWHERE]
        fresh = self._memory.begin_load(here, keys, landing, seq.request.id)
        if fresh is None:
            self._drop_state(landing)
            return False
        for (group, i), page, key in zip(missing, fresh, keys, strict=True):
            pages[group][i] = page
            size = self._sizes[group]
            content = seq.tokens[i * size : (i + 1) * size]
            landing.places[key] = page, seq.table.name_before(group, i), content
        landing.table.pages = pages
        cells = self._memory.state_pages(landing.table.state.cell) if parts else []
        landing.places |= {key: (page, b"", []) for key, page in zip(parts, cells, strict=True)}
        landing.moving = set(self.directory.load([*keys, *parts], [*fresh, *cells], sources, handover))
        if handover is not None:
            self._handed_over.add(seq)
        self._transfers.update(dict.fromkeys(landing.moving, landing))
        self._landings[landing] = None
        self._let_go(self._of.pop(seq, None))
        self._of[seq] = landing
        return True

    def _hold_state(self, landing: Landing, seq: Sequence, tokens: int, snapshot: Key | None) -> bool:
        """Hold the snapshot that is on the device, or take a cell for the one that comes; False if there is none."""
        states = self._memory.states
        if states is None:
            return True
        if snapshot is None:
            for cell in states.index.run(states.group, [states.name(seq.table.hashes[0], tokens) or b""]):
                states.adopt(landing.table.state, cell, tokens)
            return True
        landing.snapshot, landing.parts = snapshot, len(self.directory.state_keys(snapshot[1]))
        return states.begin_load(landing.table.state, snapshot, tokens, seq.request.id)

    def _drop_state(self, landing: Landing) -> None:
        if self._memory.states is not None:
            self._memory.states.drop(landing.table.state)

    def finish(self, done: TransferDone) -> None:
        """A transfer has ended."""
        way = self.directory.finish(done)
        if done.id in self._asking:
            self._looked.discard(self._asking.pop(done.id))  # there may be something to send for now
        landing = self._transfers.pop(done.id, None)
        if landing is None:
            return
        for key, ok in zip(way.keys, done.moved, strict=True):
            page, parent, tokens = landing.places[key]
            if ok and landing.snapshot is not None and key[0] >= landing.snapshot[0]:
                self._snapshot_part(landing)
            elif ok:
                self._memory.loaded(key, page, parent, tokens)
                if key[0] == 0:
                    landing.tokens[way.source] = landing.tokens.get(way.source, 0) + self._sizes[0]
        landing.seconds = max(landing.seconds, done.seconds)
        landing.moving.discard(done.id)
        if not landing.moving:
            self._memory.end_load(landing)
            if self._memory.states is not None:
                self._memory.states.end_load(landing.table.state)
            if landing.owner is None:
                self._let_go(landing)

    def _snapshot_part(self, landing: Landing) -> None:
        """One more page of a snapshot has come; with the last it can be gone on from."""
        landing.parts -= 1
        if not landing.parts and self._memory.states is not None and landing.snapshot is not None:
            self._memory.states.loaded(landing.table.state, landing.snapshot)

    def admitted(self, seq: Sequence, hit: Hit | None) -> None:
        """The sequence has its pages: what was held for it, it now holds itself."""
        self._looked.discard(seq)
        self._asked.discard(seq)
        landing = self._of.pop(seq, None)
        if hit is not None:
            loaded = sum(landing.tokens.values()) if landing is not None else 0
            self._timeline.stats.tier_queries += max(0, seq.known - hit.tokens) + loaded
        if landing is None:
            return
        self._let_go(landing)
        loaded = sum(count for name, count in landing.tokens.items() if name != PEER)
        compute = self.directory.costs.compute(loaded) if loaded else None
        saved = 0.0 if compute is None else compute - landing.seconds
        self._timeline.stats.tier_saved += saved
        seq.log.saved += saved
        for name, tokens in landing.tokens.items():
            self.directory.tier(name).stats.hit_tokens += tokens
            seq.log.tiers[name] = seq.log.tiers.get(name, 0) + tokens
            seq.log.moved += tokens // self._sizes[0] * self._memory.layout.page_bytes

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        """The sequence will not start any more."""
        self._handed_over.discard(seq)
        self._looked.discard(seq)
        self._asked.discard(seq)
        landing = self._of.pop(seq, None)
        if landing is not None:
            landing.owner = None
            if not landing.moving:
                self._let_go(landing)

    def reclaim(self, *, running: bool) -> bool:
        """Give up what is held for those who have not started, for those who have."""
        if not running:
            return False
        idle = [landing for landing in self._landings if not landing.moving]
        for landing in idle:
            if landing.owner is not None:
                self._looked.discard(landing.owner)
                del self._of[landing.owner]
            self._let_go(landing)
        return bool(idle)

    def _let_go(self, landing: Landing | None) -> None:
        if landing is not None:
            del self._landings[landing]
            self._drop_state(landing)
            for pages in landing.table.pages:
                self._memory.let_go(pages)

    # ---- away from the device -------------------------------------------------------------------------------

    def _save_computed(self, table: PageTable, upto: int) -> None:
        """Pages that a step computed go to the tiers that are kept."""
        for group, size in enumerate(self._sizes):
            last = min(upto // size, table.published[group])
            for i in range(table.written_through[group], last):
                key, page = (group, table.hashes[group][i]), table.pages[group][i]
                if page != NULL_PAGE and self._memory.holds(key, page):
                    self.directory.save(key, page)
            table.written_through[group] = max(table.written_through[group], last)

    def preempted(self, seq: Sequence) -> None:
        """Choose whether the pages a sequence is about to lose are worth saving, or are computed again."""
        if not self._tiered:
            return
        pool, table = self._memory.pool, seq.table
        keys = [
            (group, table.hashes[group][i])
            for group in range(len(self._sizes))
            for i, page in enumerate(table.pages[group][: table.published[group]])
            if page != NULL_PAGE and pool.refs(page) == 1
        ]
        if self._swaps(seq, len(keys)):
            self._timeline.stats.swaps += 1
            self.directory.wanted(keys)
        else:
            self.directory.unwanted(keys)

    def _swaps(self, seq: Sequence, pages: int) -> bool:
        if self._mode != "auto":
            return self._mode == "swap"
        costs, first = self.directory.costs, self.directory.tiers[0].name
        out, back = costs.move(DEVICE, first, pages), costs.move(first, DEVICE, pages)
        compute = costs.compute(seq.computed)
        if out is None or compute is None:
            return True  # to be measured, it must be tried
        if out + (out if back is None else back) <= compute:
            return True
        costs.decay(first, DEVICE)
        return False

    # ---- with the step --------------------------------------------------------------------------------------

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        """Some transfers may have ended by then."""
        plan = step.plan
        if plan.rows and not plan.probes:
            self.directory.costs.step(step.tokens, result.seconds)
        elif self.moving and not plan.computes:
            self._timeline.stats.tier_waits += result.seconds
        for done in result.transfers:
            self.finish(done)
        if self._tiered and self.directory.kept:
            for row, (seq, epoch) in zip(plan.rows, step.rows, strict=True):
                if seq.epoch == epoch:
                    self._save_computed(seq.table, row.start + row.count)

    def step_failed(self) -> None:
        self.directory.cancel_saves()

    def reset(self) -> None:
        """Drop what the tiers hold that do not outlive the engine, and count anew."""
        self.directory.cancel_saves()
        self.directory.drop([tier.name for tier in self.directory.tiers if not tier.spec.kept])
        for tier in self.directory.tiers:
            tier.stats = TierStats(name=tier.name, capacity=tier.spec.pages)
        if self.directory.peer is not None:
            self.directory.peer.stats = TierStats(name=PEER)
