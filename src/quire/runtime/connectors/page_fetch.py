"""Pages of one hand-over that are waited for: where each goes, and which have come, whole or in parts.

Refuses to know: who sends them, how they are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.types.handover import Handover
from quire.types.kv import LayerPart
from quire.types.transfer import Bytes, Key, TierJob


class PageFetch:
    def __init__(self, job: TierJob, handover: Handover, parts: Sequence[Sequence[LayerPart]], now: float):
        """`parts`: of a page of each group."""
        self.job = job
        self.handover = handover
        self.came: set[Key] = set()
        self.began = self.heard = now
        self._missing: dict[Key, Bytes] = dict(zip(job.keys, job.buffers, strict=True))
        self._parts = parts
        self._parts_came: dict[Key, set[int]] = {}  # of pages that have come in part

    @property
    def ended(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self._missing

    def place(self, key: Key, part: int) -> Bytes | None:
        """Where a page or a part of it goes, if it is waited for."""
        if (into := self._missing.get(key)) is None or part == -1:
            return into
        parts = self._parts[key[0]]
        if not 0 <= part < len(parts) or part in self._parts_came.get(key, ()):
            return None
        return into[parts[part].start : parts[part].end]

    def took(self, key: Key, part: int, now: float) -> bool:
        """It is in its place. Whether all of its page is."""
        self.heard = now
        if part != -1:
            came = self._parts_came.setdefault(key, set())
            came.add(part)
            if len(came) < len(self._parts[key[0]]):
                return False
        del self._missing[key]
        self.came.add(key)
        return True

    def give_up(self, keys: Sequence[Key], now: float) -> None:
        """These will not come."""
        self.heard = now
        for key in keys:
            self._missing.pop(key, None)
