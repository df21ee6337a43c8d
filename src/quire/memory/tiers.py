"""The directory: which page is in which tier below the device, what goes there, and what leaves when one is full.

    device page taken for something else ──► first tier (host)        write-behind: read before it is overwritten
    device page computed                 ──► tiers that are kept      (disk, remote), so that it outlives the engine
    tier full                            ──► next tier down, or gone  by policy
    device page that a peer wants        ──► that engine              a hand-over, as is what another engine gives

A page may be in several tiers; it is loaded from the fastest. Moves are queued here and leave with the next plan.
Refuses to know: sequences, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.memory.costs import Costs
from quire.memory.prefix import PrefixIndex
from quire.memory.ranking import Ranking
from quire.memory.state_cells import StateCells
from quire.types.clock import Clock
from quire.types.events import TierStats
from quire.types.handover import Handover
from quire.types.plan import StepPlan
from quire.types.transfer import DEVICE, PEER, Drop, Key, TierSpec, Transfer, TransferDone

ELSEWHERE = -1  # in place of a page: not on the device, but in a tier
MAX_STAGED_BYTES = 256 << 20  # bytes on their way into a tier at most
MAX_KNOWN_PAGES = 200_000  # pages remembered of a tier that looks after itself


class Tier:
    """What one tier holds, and what is on its way there."""

    def __init__(self, spec: TierSpec, policy: str):
        self.spec = spec
        self.name = spec.name
        self.holds = Ranking(policy)
        self.arriving: set[Key] = set()
        self.stats = TierStats(name=spec.name, capacity=spec.pages)
        for key in spec.keys:
            self.holds.add(key)

    def __contains__(self, key: Key) -> bool:
        return key in self.holds


class Directory:
    def __init__(
        self,
        specs: Sequence[TierSpec],
        index: PrefixIndex,
        page_bytes: int,
        policy: str = "lru",
        clock: Clock | None = None,
        states: StateCells | None = None,
        state_pages: Callable[[int], list[int]] = lambda cell: [],
    ):
        """`states`: snapshots that are moved too; `state_pages`: the pages that a cell is made of."""
        self._states, self._state_pages = states, state_pages
        self.tiers = [Tier(spec, policy) for spec in specs]
        self.peer: Tier | None = None  # other engines, where there is a connector: it holds nothing of its own
        self.costs = Costs(page_bytes)
        self._clock = clock or Clock()
        self._index = index
        self._page_bytes = page_bytes
        self._most = max(8, MAX_STAGED_BYTES // page_bytes)
        self._ids = 0
        self._queue: dict[tuple[str, str], Transfer] = {}  # not yet in a plan, by way
        self._drops: dict[str, list[Key]] = {}
        self._unavailable: list[Drop] = []  # what peers are told not to wait for
        self._moving: dict[int, Transfer] = {}
        self._pins: dict[Key, float] = {}  # until when, wherever they are
        self._unwanted: set[Key] = set()  # cheaper to compute again than to move

    @property
    def queued(self) -> bool:
        unsaved = self._states is not None and self._states.unsaved
        return bool(self._queue or self._drops or self._unavailable or unsaved)

    @property
    def kept(self) -> bool:
        return any(tier.spec.kept for tier in self.tiers)

    def tier(self, name: str) -> Tier:
        return next(tier for tier in (*self.tiers, self.peer) if tier is not None and tier.name == name)

    def connect(self) -> None:
        """There are peers that pages can be handed over to, and from."""
        self.peer = Tier(TierSpec(PEER, 0), "lru")

    # ---- looking --------------------------------------------------------------------------------------------

    def run(self, group: int, names: Iterable[bytes], *, peer: bool = False) -> list[int]:
        """As PrefixIndex.run, with ELSEWHERE for pages that a tier could deliver; with `peer`, another engine gives
        what is nowhere here."""
        if self._states is not None and group == self._states.group:
            return self._run_states(names)
        pages = []
        for name in names:
            found = self._index.run(group, [name])
            if not found and not peer and self.locate((group, name)) is None:
                break
            pages.append(found[0] if found else ELSEWHERE)
        return pages

    def _run_states(self, names: Iterable[bytes]) -> list[int]:
        """Of snapshots: cells, or ELSEWHERE if all pages of one are in tiers."""
        assert self._states is not None
        cells = []
        for name in names:
            found = self._states.index.run(self._states.group, [name])
            if not found and self.locate_state(name) is None:
                break
            cells.append(found[0] if found else ELSEWHERE)
        return cells

    def state_keys(self, name: bytes) -> list[Key]:
        """What the pages of a snapshot are called."""
        assert self._states is not None
        return [(self._states.group + i, name) for i in range(len(self._state_pages(0)))]

    def locate_state(self, name: bytes) -> list[Tier] | None:
        """The fastest tiers that have the pages of a snapshot; None: some are missing. Of a tier that others fill too,
        who has the first is taken to have all."""
        keys = self.state_keys(name)
        first = self.locate(keys[0])
        if first is None:
            return None
        found = [self.locate(key) or (None if first.spec.pages else first) for key in keys]
        known = [tier for tier in found if tier is not None]
        return known if len(known) == len(keys) else None

    def locate(self, key: Key) -> Tier | None:
        """The fastest tier that has a page."""
        return next((tier for tier in self.tiers if key in tier), None)

    # ---- moves ----------------------------------------------------------------------------------------------

    def evict(self, key: Key, page: int) -> None:
        """The device page is about to hold something else."""
        if key in self._unwanted:
            self._unwanted.discard(key)
        elif self.tiers:
            self._send(DEVICE, self.tiers[0], key, page)

    def save(self, key: Key, page: int) -> None:
        """The device page is computed for good: into the tiers that are kept."""
        for tier in self.tiers:
            if tier.spec.kept:
                self._send(DEVICE, tier, key, page)

    def evict_state(self, key: Key, cell: int) -> None:
        """A snapshot's cell is about to hold something else."""
        for part, page in zip(self.state_keys(key[1]), self._state_pages(cell), strict=True):
            self.evict(part, page)

    def _save_states(self, states: StateCells) -> None:
        """Snapshots that are new: into the tiers that are kept."""
        for key, cell in states.to_save():
            for part, page in zip(self.state_keys(key[1]), self._state_pages(cell), strict=True):
                self.save(part, page)

    def unwanted(self, keys: Iterable[Key]) -> None:
        """Do not save these when they leave the device."""
        self._unwanted.update(keys)

    def wanted(self, keys: Iterable[Key]) -> None:
        self._unwanted.difference_update(keys)

    def load(
        self,
        keys: Sequence[Key],
        pages: Sequence[int],
        sources: Sequence[Tier | None],
        handover: Handover | None = None,
    ) -> list[int]:
        """Begin to fill device pages from where `locate` found the keys; the ids of the transfers. `handover`: of what
        comes from a peer."""
        ways: dict[str, Transfer] = {}
        for key, page, tier in zip(keys, pages, sources, strict=True):
            assert tier is not None, "only what a tier has can be loaded"
            if tier.name not in ways:
                ways[tier.name] = self._transfer(tier.name, DEVICE, handover if tier is self.peer else None)
            way = ways[tier.name]
            way.keys.append(key)
            way.pages.append(page)
        for way in ways.values():
            self._queue[way.source, str(way.id)] = way  # each on its own: a request waits for this one
        return [way.id for way in ways.values()]

    def find(self, tier: Tier, keys: list[Key]) -> int:
        """Begin to ask a tier that others fill too which of the keys it has."""
        way = self._transfer(tier.name, "")
        way.keys = keys
        self._queue[tier.name, str(way.id)] = way
        return way.id

    def give(self, handover: Handover, pages: dict[Key, int], *, layerwise: bool = False) -> None:
        """Begin to send device pages to the peer that wants them. `layerwise`: the step that is planned fills them."""
        way = self._transfer(DEVICE, PEER, handover)
        way.layerwise = layerwise
        way.keys, way.pages = list(pages), list(pages.values())
        self._queue[PEER, str(way.id)] = way

    def mark_unavailable(self, handover: Handover, keys: list[Key]) -> None:
        """Tell a peer that these will not come."""
        self._unavailable.append(Drop(PEER, keys, handover))

    def _transfer(self, source: str, target: str, handover: Handover | None = None) -> Transfer:
        self._ids += 1
        return Transfer(self._ids, source, target, [], handover=handover)

    def _send(self, source: str, tier: Tier, key: Key, page: int | None = None) -> None:
        """Queue one page for a tier, unless it has it or has enough on its way."""
        if key in tier or key in tier.arriving:
            return
        if len(tier.arriving) >= self._most or not self._make_room(tier):
            tier.stats.skipped += 1
            return
        tier.arriving.add(key)
        if (source, tier.name) not in self._queue:
            self._queue[source, tier.name] = self._transfer(source, tier.name)
        way = self._queue[source, tier.name]
        way.keys.append(key)
        if page is not None:
            way.pages.append(page)

    def _make_room(self, tier: Tier) -> bool:
        """Room for one more page; what leaves goes one tier down. False if everything is pinned."""
        most = tier.spec.pages or MAX_KNOWN_PAGES
        while len(tier.holds) + len(tier.arriving) >= most:
            key = tier.holds.pop(self._clock.now)
            if key is None:
                return False
            if tier.spec.pages:
                below = self.tiers[self.tiers.index(tier) + 1 :]
                if below and not any(key in lower for lower in below):
                    self._send(tier.name, below[0], key)
                self._drop(tier, [key])
        return True

    def _drop(self, tier: Tier, keys: Iterable[Key]) -> None:
        self._drops.setdefault(tier.name, []).extend(keys)

    def hand_over(self, plan: StepPlan) -> None:
        """Put what is queued into a plan."""
        if self._states is not None:
            self._save_states(self._states)
        if not (self._queue or self._drops or self._unavailable):
            return
        for way in self._queue.values():
            self._moving[way.id] = way
            plan.transfers.append(way)
        plan.drops += [*(Drop(name, keys) for name, keys in self._drops.items()), *self._unavailable]
        self._queue, self._drops, self._unavailable = {}, {}, []

    def finish(self, done: TransferDone) -> Transfer:
        """Take in the end of a transfer."""
        way = self._moving.pop(done.id)
        moved = [key for key, ok in zip(way.keys, done.moved, strict=True) if ok]
        lost = [key for key, ok in zip(way.keys, done.moved, strict=True) if not ok]
        if way.handover is not None:
            self._handed_over(way, len(moved), len(lost), done.seconds)
            return way
        if way.target:
            self.costs.moved(way.source, way.target, len(moved), done.seconds)
        if way.target in ("", DEVICE):
            self._delivered(self.tier(way.source), way, moved, lost, done.seconds)
        else:
            tier = self.tier(way.target)
            tier.arriving.difference_update(way.keys)
            worth = self.costs.compute(1) or 0.0
            for key in moved:
                tier.holds.add(key, worth)
                tier.holds.pin(key, self._pins.get(key, 0.0))
            tier.stats.bytes_in += len(moved) * self._page_bytes
            tier.stats.save_seconds += done.seconds
            tier.stats.failed += len(lost)
        return way

    def _handed_over(self, way: Transfer, moved: int, lost: int, seconds: float) -> None:
        stats = self.tier(PEER).stats
        if way.target == PEER:
            stats.bytes_in += moved * self._page_bytes
            stats.failed += lost
        else:
            stats.bytes_out += moved * self._page_bytes
            stats.pages_out += moved
            stats.missed += lost
            stats.load_seconds += seconds

    def _delivered(self, tier: Tier, way: Transfer, moved: list[Key], lost: list[Key], seconds: float) -> None:
        if not way.target:
            for key in moved:
                tier.holds.add(key)
            return
        page = self.costs.compute(1) or 0.0
        for place, key in enumerate(moved):
            tier.holds.use(key, page * (len(moved) - place))  # without it, those after it would be in vain
        for key in lost:
            tier.holds.remove(key)
        if lost:  # damaged, or gone: never again from there
            self._drop(tier, lost)
            tier.stats.missed += len(lost)
        tier.stats.bytes_out += len(moved) * self._page_bytes
        tier.stats.pages_out += len(moved)
        tier.stats.load_seconds += seconds

    # ---- by hand --------------------------------------------------------------------------------------------

    def pin(self, keys: Iterable[Key], until: float) -> None:
        """Keep pages in whatever tier they are in, or come to."""
        if len(self._pins) > MAX_KNOWN_PAGES:
            self._pins = {key: end for key, end in self._pins.items() if end > self._clock.now}
        for key in keys:
            self._pins[key] = until
            for tier in self.tiers:
                tier.holds.pin(key, until)

    def drop(self, names: Iterable[str], keys: Iterable[Key] | None = None) -> int:
        """Drop pages of some tiers (all of them, or these); returns how many."""
        count = 0
        for tier in self.tiers:
            if tier.name in names:
                gone = [key for key in (list(tier.holds) if keys is None else keys) if key in tier]
                for key in gone:
                    tier.holds.remove(key)
                if gone:
                    self._drop(tier, gone)
                count += len(gone)
        return count

    def cancel_saves(self) -> None:
        """What is queued to leave the device shall not: its content may be wrong, or is not wanted. Loads and
        look-ups stay, requests hold pages for them."""
        for way, transfer in list(self._queue.items()):
            if transfer.source == DEVICE:
                if transfer.handover is not None:
                    self.mark_unavailable(transfer.handover, transfer.keys)
                else:
                    self.tier(transfer.target).arriving.difference_update(transfer.keys)
                del self._queue[way]
        self._unwanted.clear()

    def stats(self) -> list[TierStats]:
        for tier in self.tiers:
            tier.stats.pages = len(tier.holds)
            tier.stats.bytes = len(tier.holds) * self._page_bytes
        return [tier.stats for tier in (*self.tiers, self.peer) if tier is not None]
