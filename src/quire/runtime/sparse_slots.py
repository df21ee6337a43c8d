"""Which slots attend to only some pages, and the bounds of pages that choosing these takes.

Bounds are computed when a step wants them; what a plan changes of pages is followed here: rows, copies, moves, pages
from tiers. Bounds of pages that sequences share, or find in the prefix cache, are shared as these are. Counts the bytes
that attention of such rows reads, and those of all pages. Refuses to know: how pages are chosen, models.
"""

from __future__ import annotations

import torch

from quire.kernels.attention_backend import SPARSE_LOCAL, Batch, GroupBatch, SparseBatch
from quire.kernels.kv_views import KVViews
from quire.kernels.page_bounds import PageBounds
from quire.kernels.sparse_attention import local_page
from quire.model.decoder_spec import Attention, DecoderSpec
from quire.types.plan import StepPlan
from quire.types.transfer import DEVICE


class SparseSlots:
    def __init__(self, spec: DecoderSpec, kv: KVViews):
        mixers = [layer.mixer for layer in spec.layers]
        self._layers = {i: m.sparse for i, m in enumerate(mixers) if isinstance(m, Attention) and m.sparse is not None}
        how = next(iter(self._layers.values()), None)
        self._default = 0 if how is None else how.pages
        self._by_bounds = how is not None and how.kind == "quest"
        self._kv = kv
        self._budgets: dict[int, tuple[int, int]] = {}  # by slot: pages, and from which position on
        self._bounds: PageBounds | None = None
        self.bytes_read = self.bytes_of_all = 0  # by attention of rows that read only some pages

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan's changes of slots and pages."""
        for slot in plan.frees:
            self._budgets.pop(slot, None)
        for admit in plan.admits:
            asked = admit.params.sparse_pages
            if pages := self._default if asked is None else asked:
                self._budgets[admit.slot] = pages, admit.prompt_len
        if self._bounds is None:
            return
        for transfer in plan.transfers:
            if transfer.target == DEVICE:
                self.forget(transfer.pages)
        for group, layout in enumerate(self._kv.layout.groups):
            self._bounds.forget(group, [target for _, target in plan.copies])
            moved = [target for shift in plan.rope_shifts if shift.group == group for target in shift.targets]
            self._bounds.forget(group, [target // layout.tokens_per_page for target in moved])

    def counted(self) -> tuple[int, int]:
        """Bytes that were read since it was last asked, and those of all pages."""
        found = self.bytes_read, self.bytes_of_all
        self.bytes_read = self.bytes_of_all = 0
        return found

    def moved(self, group: int, slots: torch.Tensor) -> None:
        """Keys at these KV slots have changed outside of a plan."""
        if self._bounds is not None:
            self._bounds.forget(group, slots // self._kv.layout.groups[group].tokens_per_page)

    def forget(self, pages: list[int]) -> None:
        """These pages have another content."""
        for group in range(len(self._kv.layout.groups)) if self._bounds is not None else ():
            assert self._bounds is not None
            self._bounds.forget(group, pages)

    def sparse(self, plan: StepPlan, batch: Batch) -> SparseBatch | None:
        """Of a step's batch the rows whose queries choose their pages, with the bounds for it; None: there are none.
        Prompts read everything, and so does what is computed again after preemption."""
        if self._bounds is not None:
            for group, part in enumerate(batch.groups):
                self._bounds.forget(group, part.kv_slots // part.tokens_per_page)
        if not self._budgets or batch.paths is not None or batch.asks:
            return None
        known = [(row, *self._budgets.get(row.slot, (0, 0))) for row in plan.rows]
        budgets = [pages if row.start >= first and row.count <= SPARSE_LOCAL else 0 for row, pages, first in known]
        for group, part in enumerate(batch.groups):
            if self._sparse_layers(group):
                budgets = self._choosing(part, batch, budgets)
        if not any(budgets):
            return None
        if self._by_bounds and self._bounds is None:
            self._bounds = PageBounds(self._kv)
        for row, budget in enumerate(budgets):
            if budget:
                self._count(batch, row, budget)
        return SparseBatch(budgets, [None] * len(batch.groups) if self._bounds is None else self._bounds.groups)

    def _sparse_layers(self, group: int) -> int:
        return len(self._layers.keys() & set(self._kv.layout.groups[group].layers))

    def _choosing(self, part: GroupBatch, batch: Batch, budgets: list[int]) -> list[int]:
        """Without rows that have no more pages than they may read, or read pages whose keys this very step computes."""
        size = part.tokens_per_page
        changing = (part.kv_slots // size).unique()
        found = []
        for row, budget in enumerate(budgets):
            length = batch.kv_lens[row]
            local = local_page(length - 1, size, budget, bounded=self._by_bounds)
            enough = budget and length > budget * size
            found.append(budget if enough and not torch.isin(part.page_table[row, :local], changing).any() else 0)
        return found

    def _count(self, batch: Batch, row: int, budget: int) -> None:
        """Bring the bounds of the pages that a row chooses among up to date, and count what it reads."""
        layout, end = self._kv.layout, batch.kv_lens[row]
        for index, (part, group) in enumerate(zip(batch.groups, layout.groups, strict=True)):
            size, chosen, layers = group.tokens_per_page, self._sparse_layers(index), len(group.layers)
            page = layout.page_bytes // layers  # of one layer
            bound = 4 * group.kv_heads * group.head_dim if self._by_bounds else 0
            for position in range(end - batch.counts[row], end):
                pages, local = position // size + 1, local_page(position, size, budget, bounded=self._by_bounds)
                some = budget * page + bound * (local - 1) if pages > budget else pages * page
                self.bytes_read += (layers - chosen) * pages * page + chosen * some
                self.bytes_of_all += layers * pages * page
            if self._bounds is not None and chosen:
                local = local_page(end - 1, size, budget, bounded=True)
                self.bytes_read += self._bounds.refresh(index, part.page_table[row, :local]) * layers * page // 2
