"""The host tier: pages in this machine's memory, pinned where a GPU reads and writes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from quire.runtime.tiers.worker_thread import ThreadedTier
from quire.types.transfer import HOST, Bytes, Key


class HostTier(ThreadedTier):
    name = HOST

    def __init__(self, pages: int, page_bytes: int, signal: threading.Event, *, pinned: bool = False):
        if pinned:
            self._memory = torch.empty(pages, page_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            self._memory = np.zeros((pages, page_bytes), dtype=np.uint8)  # takes no room before it is touched
        self._free = list(range(pages - 1, -1, -1))
        self._place: dict[Key, int] = {}
        super().__init__(signal)

    def scan(self) -> list[Key]:
        return list(self._place)

    def _put(self, keys: list[Key], pages: Sequence[Bytes]) -> list[bool]:
        return [self._put_one(key, page) for key, page in zip(keys, pages, strict=True)]

    def _put_one(self, key: Key, page: Bytes) -> bool:
        place = self._place.get(key)
        if place is None:
            if not self._free:
                return False
            place = self._free.pop()
        np.copyto(self._memory[place], page)
        self._place[key] = place
        return True

    def _get(self, keys: list[Key], into: Sequence[Bytes]) -> list[bool]:
        found = self._find(keys)
        for key, buffer, here in zip(keys, into, found, strict=True):
            if here:
                np.copyto(buffer, self._memory[self._place[key]])
        return found

    def _find(self, keys: list[Key]) -> list[bool]:
        return [key in self._place for key in keys]

    def _drop(self, keys: list[Key]) -> list[bool]:
        gone = [self._place.pop(key, None) for key in keys]
        self._free += [place for place in gone if place is not None]
        return [place is not None for place in gone]
