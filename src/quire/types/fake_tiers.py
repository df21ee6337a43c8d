"""Fakes of the tiers below the device: a store without threads or files, and the tiers of a FakeExecutor."""

from __future__ import annotations

import random
from collections import OrderedDict

from quire.types.plan import StepPlan
from quire.types.transfer import DEVICE, Bytes, Key, TierDone, TierJob, TierSpec, Transfer, TransferDone

Entry = tuple[int, int, int]  # digest, position it was rotated to, digest of what had been evicted
Entries = dict[tuple[int, int], Entry]  # by (page, offset)


class FakeTier:
    """A KVTier in a dictionary: jobs are done at `poll`, gets and finds first."""

    def __init__(self) -> None:
        self._pages: OrderedDict[Key, Bytes] = OrderedDict()
        self._jobs: dict[int, TierJob] = {}
        self._cancelled: set[int] = set()

    def submit(self, job: TierJob) -> None:
        self._jobs[job.id] = job

    def poll(self) -> list[TierDone]:
        jobs = sorted(self._jobs.values(), key=lambda job: job.kind not in ("get", "find"))
        self._jobs.clear()
        return [TierDone(job.id, [self._do(job, i) for i in range(len(job.keys))], 0.0) for job in jobs]

    def _do(self, job: TierJob, i: int) -> bool:
        key = job.keys[i]
        if job.id in self._cancelled:
            return False
        if job.kind == "put":
            self._pages[key] = job.buffers[i].copy()
        elif key not in self._pages:
            return False
        elif job.kind == "get":
            job.buffers[i][:] = self._pages[key]
            self._pages.move_to_end(key)
        elif job.kind == "drop":
            del self._pages[key]
        return True

    def cancel(self, job_id: int) -> None:
        self._cancelled.add(job_id)

    def scan(self) -> list[Key]:
        return list(self._pages)

    def close(self) -> None:
        self.poll()


class FakeTiers:
    """Where a FakeExecutor's pages go and come from: after any delay, and now and then not at all."""

    def __init__(self, specs: tuple[TierSpec, ...], page_size: int, *, seed: int = 0, losses: float = 0.0):
        self.specs = specs
        self._rng = random.Random(seed)
        self._losses = losses
        self._offsets = range(page_size)
        self._held: dict[str, dict[Key, dict[int, Entry]]] = {spec.name: {} for spec in specs}
        self._under_way: list[tuple[Transfer, list[dict[int, Entry] | None]]] = []

    def start(self, plan: StepPlan, kv: Entries) -> None:
        """Begin what a plan asks for: device pages are read at once, and hold nothing while they are being filled."""
        for way in plan.transfers:
            if way.source == DEVICE:
                taken = [{i: kv[page, i] for i in self._offsets if (page, i) in kv} for page in way.pages]
                self._under_way.append((way, list(taken)))
            else:
                self._under_way.append((way, [self._held[way.source].get(key) for key in way.keys]))
        for way in plan.transfers:
            if way.target == DEVICE:
                for page in way.pages:
                    for i in self._offsets:
                        kv.pop((page, i), None)
        for drop in plan.drops:
            for key in drop.keys:
                self._held[drop.tier].pop(key, None)

    def poll(self, kv: Entries, *, some: bool) -> list[TransferDone]:
        """What has ended; at least one thing if `some` and there is any."""
        ended = [entry for entry in self._under_way if self._rng.random() < 0.3]
        ended = ended or (self._under_way[:1] if some else [])
        self._under_way = [entry for entry in self._under_way if entry not in ended]
        return [TransferDone(way.id, self._end(way, contents, kv), 0.001) for way, contents in ended]

    def _end(self, way: Transfer, contents: list[dict[int, Entry] | None], kv: Entries) -> list[bool]:
        moved = [content is not None and self._rng.random() >= self._losses for content in contents]
        for place, (key, content, ok) in enumerate(zip(way.keys, contents, moved, strict=True)):
            if ok and way.target == DEVICE and content is not None:
                kv.update({(way.pages[place], i): digest for i, digest in content.items()})
            elif ok and way.target and content is not None:
                self._held[way.target][key] = content
        for spec in self.specs:
            assert not spec.pages or len(self._held[spec.name]) <= spec.pages, f"{spec.name} holds too much"
        return moved
