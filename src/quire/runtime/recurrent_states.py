"""States of recurrent layers on the device: the cells, and which of them the rows of a step read and write.

    cells  [ zeros | handed out by plans ... | waste | drafts of slot 0 ... | drafts of slot 1 ... ]

Cells are made of pages, behind those of tokens, so that they move between tiers as pages do.
A row with drafts leaves its state in its own cell, each draft token one in a cell beside; once it is known how many
were accepted, the last of those is copied. Refuses to know: what a state means, who holds which cell.
"""

from __future__ import annotations

import torch

from quire.kernels.state_views import Round, Run, apart, cells_in, rounds_of
from quire.types.kv import NULL_STATE, KVLayout
from quire.types.plan import Capacity, Row


class RecurrentStates:
    def __init__(self, layout: KVLayout, capacity: Capacity, pages: torch.Tensor):
        """`pages`: those of tokens, and as many behind them as `pages_for` says."""
        self._device = pages.device
        self.waste = capacity.states  # the cell where padding writes
        self._drafts = capacity.drafts
        self._ends: dict[int, int] = {}  # by slot: the cell behind its last row
        self.cells = cells_in(pages[capacity.pages :], layout)

    @staticmethod
    def pages_for(layout: KVLayout, capacity: Capacity) -> int:
        return layout.state_pages * (capacity.states + 1 + capacity.slots * capacity.drafts) if layout.states else 0

    def _draft_cell(self, slot: int, place: int) -> int:
        return self.waste + 1 + slot * self._drafts + place

    def rounds(self, rows: list[Row]) -> list[Round]:
        """Drafts, which no plan knows of, are rows without states behind their own."""
        runs: list[Run] = []
        source = at = number = place = 0
        for row in rows:
            if row.states:
                source, number, place, done = row.state, 0, 0, 0
                for upto, cell in row.states:
                    runs.append(Run(at + done, upto - done, source, cell, number))
                    source, done, number = cell, upto, number + 1
                self._ends[row.slot] = source
            else:
                cell = self._draft_cell(row.slot, place)
                runs.append(Run(at, row.count, source, cell, number))
                source, number, place = cell, number + 1, place + 1
            at += row.count
        return rounds_of(runs, self._device)

    def single(self, rows: list[Row]) -> list[tuple[int, int]] | None:
        """(source, target) of rows that have one token each and no drafts, if none writes what another reads."""
        if any(len(row.states) != 1 or row.count != 1 for row in rows):
            return None
        cells = [(row.state, row.states[0][1]) for row in rows]
        if not apart([Run(i, 1, *cell, 0) for i, cell in enumerate(cells)]):
            return None
        self._ends.update((row.slot, target) for row, (_, target) in zip(rows, cells, strict=True))
        return cells

    def null_rounds(self, counts: list[int]) -> list[Round]:
        """Of rows that only pad, or warm up."""
        starts = [sum(counts[:i]) for i in range(len(counts))]
        runs = [Run(start, n, NULL_STATE, self.waste, 0) for start, n in zip(starts, counts, strict=True)]
        return rounds_of(runs, self._device)

    @torch.inference_mode()
    def keep(self, slot: int, accepted: int) -> None:
        """So many drafts of a slot's last row were accepted."""
        if accepted:
            self.cells[self._ends[slot]] = self.cells[self._draft_cell(slot, accepted - 1)]
