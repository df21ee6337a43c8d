"""Which rows of a decoding step share their first pages, so that attention reads those once for all of them.

The host keeps each slot's page list beside the device's table. Groups are found anew only when the rows change:
pages that are shared are full, and stay what they are while their rows decode. Refuses to know: contents, kernels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.types.plan import StepPlan

BLOCK_HEADS = 64  # query heads of one tile
MIN_ROWS = 16  # rows from which looking for groups pays

Lists = npt.NDArray[np.int32]


class SharedPrefixes:
    def __init__(self, slots: int, page_size: int, group_heads: int):
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._size = page_size
        self._queries = max(1, BLOCK_HEADS // group_heads)
        self._rows: list[int] = []
        self._found: tuple[Lists, Lists, Lists] | None = None

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan's changes."""
        for admit in plan.admits:
            self._pages[admit.slot] = []
        for delta in plan.deltas:
            pages = self._pages[delta.slot]
            if delta.index < len(pages):
                self._rows = []
            pages[delta.index :] = delta.pages
        if plan.admits or plan.frees:
            self._rows = []

    def items(self, rows: int) -> int:
        """Tiles of query rows to provide for in a step of so many rows."""
        return rows // self._queries + 8

    def lists(self, plan: StepPlan, rows: int) -> Lists | None:
        """Groups among the plan's single-token rows, laid out as `split` reads them, padded to `rows`; None if nothing
        worth it is shared."""
        if len(plan.rows) < MIN_ROWS:
            return None
        slots = [row.slot for row in plan.rows]
        if slots != self._rows:
            self._rows = slots
            from quire.kernels.triton.cascade import cut, find_groups  # needs triton, as does the caller

            groups = None
            if len(set(slots)) == len(slots):  # rows of one slot are not decoding: the next are elsewhere
                held = [row.start - row.shift for row in plan.rows]
                groups = find_groups([self._pages[s] for s in slots], held, self._size)
            self._found = cut(groups, [1] * len(slots), self._size, self._queries) if groups else None
        if self._found is None or len(self._found[0]) > self.items(rows):
            return None
        items, members, begin = self._found
        flat = np.zeros(self.length(rows), np.int32)
        flat[: 4 * self.items(rows)] = -1
        flat[: items.size] = items.ravel()
        at = 4 * self.items(rows)
        flat[at : at + members.size] = members.ravel()
        flat[at + 2 * rows : at + 2 * rows + begin.size] = begin
        return flat

    def length(self, rows: int) -> int:
        return -(-(4 * self.items(rows) + 3 * rows) // 2) * 2  # even, to travel as 64-bit integers
