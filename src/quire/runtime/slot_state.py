"""Slot state on the device: every sequence's tokens and page tables, changed by deltas only.

    tokens   [slots + 1, max_model_len]     prompt, outputs, and what the device sampled but the host has not read
    tables   per group [slots + 1, pages]   KV position p of a slot lives in page tables[g][slot, p // size]
    adapters [slots + 1]                    LoRA adapter of each slot's sequence; 0: none

A step's batch is assembled on the device from these and five small integers a row. The last slot is the null slot:
rows that pad a step to a captured size read and write there, and its pages are all the null page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.backend_choice import choose_assemble
from quire.runtime.staging import Staging
from quire.types.kv import KVLayout
from quire.types.plan import Admit, Capacity, StepPlan

MAX_COPIES = 8  # up to so many short runs are copied each by itself: sooner than places for a scatter are made


class Run(NamedTuple):
    """target[row, start : start + len(values)] = values"""

    target: torch.Tensor
    row: int
    start: int
    values: list[int]


class SlotState:
    def __init__(self, layout: KVLayout, capacity: Capacity, device: torch.device, staging: Staging):
        self._layout = layout
        self._device = device
        self._staging = staging
        self._assemble = choose_assemble(device)
        self.null_slot = capacity.slots
        self.tokens = torch.zeros(capacity.slots + 1, capacity.max_model_len, dtype=torch.int32, device=device)
        self._adapters = torch.zeros(capacity.slots + 1, dtype=torch.int64, device=device)
        self._host_adapters = [0] * (capacity.slots + 1)
        self._tables = [
            torch.zeros(capacity.slots + 1, -(-capacity.longest // g.tokens_per_page), dtype=torch.int32, device=device)
            for g in layout.groups
        ]

    def apply(self, plan: StepPlan) -> None:
        """Fill newly occupied slots, write tokens chosen elsewhere, bring page tables up to date."""
        copied = [Run(self.tokens, a.slot, a.unread, a.tokens[a.unread :]) for a in plan.admits]  # long ones
        changes = [[Run(self.tokens, w.slot, w.start, w.tokens) for w in plan.writes], *([] for _ in self._tables)]
        for delta in plan.deltas:
            changes[1 + delta.group].append(Run(self._tables[delta.group], delta.slot, delta.index, delta.pages))
        for runs in changes:
            if len(runs) > MAX_COPIES:
                self._scatter(runs)
            else:
                copied += runs
        if copied:
            self._copy(copied)
        if plan.admits:
            self._adapt([admit for admit in plan.admits if admit.adapter != self._host_adapters[admit.slot]])

    def _copy(self, runs: list[Run]) -> None:
        """Each by a copy of its own, out of one buffer."""
        count = sum(len(run.values) for run in runs)
        packed = bytearray(8 * -(-count // 2))  # staged as 64-bit integers
        struct.pack_into(f"{count}i", packed, 0, *chain.from_iterable(run.values for run in runs))
        staged = self._staging.stage(np.frombuffer(packed, dtype=np.int64)).view(torch.int32)
        end = 0
        for target, row, start, values in runs:
            begin, end = end, end + len(values)
            target[row, start : start + len(values)].copy_(staged[begin:end], non_blocking=True)

    def _scatter(self, runs: list[Run]) -> None:
        """All of them, in one tensor, by one kernel. No two write to the same place."""
        counts = np.array([len(run.values) for run in runs])
        starts = np.array([run.start for run in runs])
        flat = np.fromiter(chain.from_iterable(run.values for run in runs), np.int64, counts.sum())
        columns = np.arange(len(flat)) + np.repeat(starts + counts - counts.cumsum(), counts)
        sent = self._staging.upload(np.stack([np.repeat([run.row for run in runs], counts), columns, flat]))
        runs[0].target[sent[0], sent[1]] = sent[2].int()

    def _adapt(self, changed: list[Admit]) -> None:
        if changed:
            pairs = [(admit.slot, admit.adapter) for admit in changed]
            for slot, adapter in pairs:
                self._host_adapters[slot] = adapter
            sent = self._staging.upload(np.array(pairs, dtype=np.int64).T)
            self._adapters[sent[0]] = sent[1]

    def adapted(self, slots: Iterable[int]) -> bool:
        """Whether any of these has an adapter."""
        return any(self._host_adapters[slot] for slot in slots)

    def batch(
        self,
        rows: torch.Tensor,
        tokens: int,
        counts: list[int],
        kv_lens: list[int],
        prefix: Any = None,
        *,
        adapted: bool = False,
    ) -> tuple[torch.Tensor, Batch]:
        """Input token ids [tokens] and the batch of `rows` [4 or more, rows]: slot, start, count, shift.

        `counts` and `kv_lens` are what the host knows: exact, or bounds that hold for every use of a captured step.
        `prefix`: which rows share pages, for the attention backend. `adapted`: some rows may have adapters.
        """
        found = []
        for spec, table in zip(self._layout.groups, self._tables, strict=True):
            width = -(-max(kv_lens) // spec.tokens_per_page)
            found.append(self._assemble(rows, self.tokens, table, spec.tokens_per_page, tokens, width))
        batch = Batch(
            positions=found[0].positions,
            query_start=found[0].query_start,
            kv_len=found[0].kv_len,
            counts=counts,
            kv_lens=kv_lens,
            groups=tuple(
                GroupBatch(spec.tokens_per_page, part.page_table, part.kv_slots, prefix)
                for spec, part in zip(self._layout.groups, found, strict=True)
            ),
        )
        if adapted:
            batch.adapters = self._adapters[rows[0]]
            if tokens != batch.rows:
                at = torch.arange(tokens, device=self._device)
                batch.adapters = batch.adapters[torch.searchsorted(batch.query_start[1:].long(), at, right=True)]
        return found[0].input_ids, batch

    def kv_slots(self, slot: int, places: torch.Tensor) -> list[torch.Tensor]:
        """Where a slot's K and V at these places are, by group: page * tokens_per_page + offset."""
        sizes = [group.tokens_per_page for group in self._layout.groups]
        return [
            table[slot, places // size].long() * size + places % size
            for table, size in zip(self._tables, sizes, strict=True)
        ]

    def store(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Sampled tokens are stored in their slots, unread by the host."""
        self.tokens[slots, positions] = token_ids.int()
