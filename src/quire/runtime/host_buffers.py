"""Host memory that pages pass through on their way to or from the device, kept for the next that do: on a GPU it is
locked, and to lock a gigabyte takes half a second.

Refuses to know: what is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

SLAB_BYTES = 32 << 20
MAX_KEPT_BYTES = 4 << 30  # once nobody uses them


class HostRows(list[np.ndarray]):
    """Rows of bytes, and the memory that they are in: `parts`, uint8 [some, bytes], one after the other."""

    def __init__(self, slabs: list[torch.Tensor], counts: list[int], row_bytes: int):
        """`counts`: rows in each slab."""
        self.slabs = slabs
        self.parts = [s[: n * row_bytes].view(n, row_bytes) for s, n in zip(slabs, counts, strict=True)]
        super().__init__(row for part in self.parts for row in part.numpy())


class HostBuffers:
    def __init__(self, row_bytes: int, *, pinned: bool):
        """`row_bytes`: the most that a row has."""
        self._slab_bytes = max(SLAB_BYTES, row_bytes)
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, rows: int, row_bytes: int) -> HostRows:
        each = self._slab_bytes // row_bytes
        counts = [min(each, rows - first) for first in range(0, rows, each)]
        return HostRows([self._slab(count * row_bytes) for count in counts], counts, row_bytes)

    def _slab(self, size: int) -> torch.Tensor:
        """A whole one, or where that would be mostly empty so many bytes, which are not kept."""
        if 2 * size < self._slab_bytes:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        with self._lock:
            if self._free:
                return self._free.pop()
        return torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, rows: Sequence[np.ndarray]) -> None:
        """Nothing reads or writes these any more, if they were taken here."""
        if isinstance(rows, HostRows) and self._pinned:
            whole = [slab for slab in rows.slabs if slab.nbytes == self._slab_bytes]
            with self._lock:
                self._free += whole[: MAX_KEPT_BYTES // self._slab_bytes - len(self._free)]
