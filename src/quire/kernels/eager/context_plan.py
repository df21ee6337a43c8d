"""What layers with the same attention share in a step of a context-parallel rank: masks of what comes round the ring,
and what the rank's own pages have to say to queries of all ranks.

    queries:  [ rows that every rank has | rank 0's of divided rows with keys before them | rank 1's | ... ]

A rank has every N-th token of a page: its own token j of a sequence is at position j N + rank. Refuses to know: how
queries come here and outputs go back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from quire.kernels.attention_backend import AttentionSpec, GroupBatch
from quire.kernels.context_split import ContextSplit, RingBlock
from quire.kernels.eager.partial_attention import Partial, partial_attention, visible_keys
from quire.kernels.eager.sdpa_attention import Bucket, Plan
from quire.kernels.kv_views import LayerKV


@dataclass
class PageQueries:
    """Rows of as many queries each, and the pages they read; the bucket's tokens are places among the queries."""

    bucket: Bucket
    visible: torch.Tensor | None  # [rows, queries or 1, keys]; None: the first `keys`
    keys: int | None = None


class ContextPlan:
    def __init__(self, split: ContextSplit, group: GroupBatch, spec: AttentionSpec):
        """`group`: its pages are the scheduler's, of the tokens of all ranks."""
        self._split, self._spec = split, spec
        self._table, self._size = group.page_table, group.tokens_per_page
        self.own = split.own_cached()  # of this rank's queries, those in divided rows
        self.asked = [len(split.cached_queries(rank)) for rank in range(split.size)]  # by rank, of divided rows
        self.replicated = len(split.replicated)
        self._queries = self._replicated() + self._divided()
        self._plan = Plan([each.bucket for each in self._queries])
        self.ring = [self._blocks(source) for source in range(split.size)] if split.rows else []  # by rank it came from

    def _blocks(self, source: int) -> list[tuple[RingBlock, torch.Tensor | None]]:
        """With which keys are visible, [1, queries, keys]; None: all, on the diagonal up to the query's own."""
        split, window, positions = self._split, self._spec.window, self._split.whole.positions
        found: list[tuple[RingBlock, torch.Tensor | None]] = []
        for block in split.ring(source):
            if window is not None and not self._spec.chunked and block.gap >= window:
                continue
            seen = None
            if window is not None:
                asking, keys = split.tokens[block.queries], split.keys[source][block.keys]
                seen = visible_keys(self._spec, positions[asking], positions[keys])[None]
            found.append((block, seen))
        return found

    def _replicated(self) -> list[PageQueries]:
        """A query each, with those that have as many pages, within a factor of two."""
        batch = self._split.batch()
        row_of = [row for row, count in enumerate(batch.counts) for _ in range(count)]
        alike: defaultdict[int, list[int]] = defaultdict(list)
        for place, token in enumerate(self._split.replicated.tolist()):
            alike[(self._pages(batch.kv_lens[row_of[token]], 1) - 1).bit_length()].append(place)
        found = []
        for places in alike.values():
            which = torch.tensor(places, device=batch.positions.device)
            tokens = self._split.replicated[which]
            rows = [row_of[token] for token in tokens.tolist()]
            positions = batch.positions[tokens][:, None]
            pages = max(self._pages(batch.kv_lens[row], 1) for row in rows)
            found.append(self._read(which, rows, positions, positions, pages))
        return found

    def _divided(self) -> list[PageQueries]:
        """All ranks' queries of a row, over what is before it."""
        split, whole = self._split, self._split.whole
        of_rank = [split.cached_queries(rank) for rank in range(split.size)]
        tokens = [token for some in of_rank for token in some]
        found = []
        for row in split.cached_rows():
            first, count = split.first_token(row), whole.counts[row]
            places = [self.replicated + i for i, token in enumerate(tokens) if first <= token < first + count]
            which = torch.tensor(places, device=whole.positions.device)
            asking = torch.tensor([tokens[i - self.replicated] for i in places], device=whole.positions.device)
            limits = whole.positions[first].view(1, 1) - 1
            pages = self._pages(whole.kv_lens[row] - count, count)
            read = self._read(which, [row], whole.positions[asking][None], limits, pages)
            if self._spec.window is None and limits.device.type == "cpu":  # where host lengths are exact
                seen = len(range(split.rank, whole.kv_lens[row] - count, split.size))
                read = PageQueries(read.bucket, None, seen)
            found.append(read)
        return found

    def _pages(self, length: int, count: int) -> int:
        """That so many queries read of what is so long."""
        pages, window = -(-length // self._size), self._spec.window
        return pages if window is None else min(pages, (window + count + self._size - 3) // self._size + 1)

    def _read(
        self, which: torch.Tensor, rows: list[int], positions: torch.Tensor, limits: torch.Tensor, pages: int
    ) -> PageQueries:
        """positions [rows, queries]; limits [rows, queries or 1]: the last position that they see."""
        split, device = self._split, positions.device
        table, held = self._table[torch.tensor(rows, device=device)], self._size // split.size
        keys = (torch.arange(pages * held, device=device) * split.size + split.rank)[None]
        wanted = torch.arange(pages, device=device)[None].expand(len(rows), pages)
        oldest = self._spec.first_seen(positions)
        if oldest is not None:
            first = oldest.amin(1, keepdim=True) // self._size
            keys, wanted = keys + first * self._size, wanted + first
        visible = keys[:, None, :] <= limits[:, :, None]
        if oldest is not None:
            visible = visible & (keys[:, None, :] >= oldest[:, :, None])
        from_table = table.gather(1, wanted.clamp(max=table.shape[1] - 1)).reshape(-1)
        bucket = Bucket(which, len(rows), positions.shape[1], pages * held, from_table)
        unseen = ~visible.any(1).expand(len(rows), -1)  # whatever is there, NaN too, counts for nothing
        bucket.stale = unseen.reshape(-1).nonzero().flatten()
        return PageQueries(bucket, visible)

    def attend_pages(self, spec: AttentionSpec, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
        """Queries [all, heads, dim] → what this rank's pages make of them, packed: [all, heads, value dim + 1]."""
        packed = torch.empty(*q.shape[:2], spec.value_dim + 1, device=q.device)
        for each in self._queries:
            bucket = each.bucket
            k, v = self._plan.gather(bucket, kv, q)
            asked = q[bucket.tokens].unflatten(0, (bucket.rows, bucket.count))
            part = partial_attention(spec, asked, k[:, : each.keys], v[:, : each.keys], each.visible)
            packed[bucket.tokens] = Partial(part.out.flatten(0, 1), part.lse.flatten(0, 1)).packed()
        return packed
