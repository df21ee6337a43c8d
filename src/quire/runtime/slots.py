"""Slot state on the device: every sequence's tokens and page tables, changed by deltas only.

    tokens   [slots, max_len]           prompt, outputs, and whatever the device drew but the host has not read
    tables   per group [slots, pages]   KV position p of a slot lives in page tables[g][slot, p // size]

A step's batch is assembled on the device from these and three small integers a row.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.attention import Batch, GroupBatch
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan


class SlotState:
    def __init__(self, layout: KVLayout, capacity: Capacity, device: torch.device):
        self._layout = layout
        self._device = device
        length = capacity.max_model_len
        self.tokens = torch.zeros(capacity.slots, length, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(capacity.slots, -(-length // g.tokens_per_page), dtype=torch.int32, device=device)
            for g in layout.groups
        ]

    def apply(self, plan: StepPlan) -> None:
        """Fill newly occupied slots and bring page tables up to date."""
        if plan.admits:
            slots = [a.slot for a in plan.admits]
            lengths = [len(a.tokens) for a in plan.admits]
            flat = np.concatenate([np.asarray(a.tokens, dtype=np.int64) for a in plan.admits])
            at, column = _ragged(slots, [0] * len(slots), lengths)
            rows = self.upload(np.stack([at, column, flat]))
            self.tokens[rows[0], rows[1]] = rows[2].int()
        for group, table in enumerate(self._tables):
            deltas = [d for d in plan.deltas if d.group == group]
            if deltas:
                at, column = _ragged(
                    [d.slot for d in deltas], [d.index for d in deltas], [len(d.pages) for d in deltas]
                )
                pages = np.concatenate([np.asarray(d.pages, dtype=np.int64) for d in deltas])
                rows = self.upload(np.stack([at, column, pages]))
                table[rows[0], rows[1]] = rows[2].int()

    def batch(self, plan: StepPlan) -> tuple[torch.Tensor, Batch]:
        """Input token ids [tokens] and the batch, gathered on the device."""
        counts = [row.count for row in plan.rows]
        kv_lens = [row.start + row.count for row in plan.rows]
        host = np.array([[row.slot, row.start, row.count] for row in plan.rows], dtype=np.int64).T
        slots, starts, lengths = self.upload(np.ascontiguousarray(host))
        total = sum(counts)
        row_of = torch.repeat_interleave(lengths, output_size=total)  # [tokens]
        ends = lengths.cumsum(0)
        positions = torch.arange(total, device=self._device) + (starts + lengths - ends)[row_of]
        slot_of = slots[row_of]
        groups = []
        for spec, table in zip(self._layout.groups, self._tables, strict=True):
            size = spec.tokens_per_page
            pages = table[slot_of, positions // size].long()
            groups.append(
                GroupBatch(
                    tokens_per_page=size,
                    page_table=table[:, : -(-max(kv_lens) // size)][slots],
                    kv_slots=pages * size + positions % size,
                )
            )
        query_start = torch.nn.functional.pad(ends, (1, 0)).int()
        batch = Batch(
            positions=positions,
            query_start=query_start,
            kv_len=(starts + lengths).int(),
            counts=counts,
            kv_lens=kv_lens,
            groups=tuple(groups),
        )
        return self.tokens[slot_of, positions].long(), batch

    def store(self, plan: StepPlan, token_ids: torch.Tensor) -> None:
        """Drawn tokens take their place in their slots, unread by the host."""
        host = np.array([[s.slot for s in plan.samples], [s.position for s in plan.samples]], dtype=np.int64)
        slots, positions = self.upload(host)
        self.tokens[slots, positions] = token_ids.int()

    def upload(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _ragged(rows: list[int], starts: list[int], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Row index and column of each element of ragged runs that begin at `starts`."""
    counts = np.asarray(lengths)
    ends = counts.cumsum()
    columns = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(np.asarray(starts) + counts - ends, counts)
    return np.repeat(np.asarray(rows), counts), columns
