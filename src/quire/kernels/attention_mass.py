"""`measured+`: rows that want to know what they attend to compute their probabilities as such; all others take another
backend.

Attention kernels never hold the probabilities of a query all at once. Here, for the few rows that ask, they do: one
pass gives both the output and the sum over queries and heads of what each page, or token, was paid. Refuses to know:
how the other backend works, what the sums are for. The compiled decoder has its own way (`csrc/attend.h`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch, GroupBatch, Part, part_of
from quire.kernels.kv_views import LayerKV, take_pages

SCORES = 1 << 26  # held at once


@dataclass
class Plan:
    rest: Part | None  # rows that do not ask; None: all do
    other: Any


class AttentionMassRows:
    def __init__(self, other: AttentionBackend):
        self.other = other
        self.name = f"{other.name}, probabilities where they are asked for"
        self.shares = other.shares

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return self.other.supports(spec, device)

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> Plan:
        rows = [row for row in range(batch.rows) if row not in batch.asks]
        if not rows:
            return Plan(None, None)
        rest = part_of(batch, group, rows)
        return Plan(rest, self.other.plan(rest.batch, rest.group, spec))

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: LayerKV,
        batch: Batch,
        group: GroupBatch,
        plan: Plan,
    ) -> torch.Tensor:
        assert batch.mass is not None
        out = q.new_empty(*q.shape[:2], spec.value_dim)
        if rest := plan.rest:
            out[rest.tokens] = self.other.forward(spec, q[rest.tokens], kv, rest.batch, rest.group, plan.other)
        starts = list(accumulate(batch.counts, initial=0))
        for row in batch.asks:
            keys, size = batch.kv_lens[row], group.tokens_per_page
            pages, run = -(-keys // size), batch.mass_tokens or size
            runs = -(-keys // run)
            table = group.page_table[row, :pages]
            k, v = (take_pages(*side, table).flatten(0, 1)[:keys].float() for side in kv.sides)
            step = max(1, SCORES // (spec.heads * keys))
            for first in range(starts[row], starts[row + 1], step):
                here = slice(first, min(first + step, starts[row + 1]))
                mixed, paid = _attend(spec, q[here], k, v, batch.positions[here])
                out[here] = mixed.to(q.dtype)
                batch.mass[row, :runs] += F.pad(paid, (0, runs * run - keys)).view(runs, run).sum(1)
        return out


def _attend(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [tokens, heads, dim], k and v [keys, kv_heads, dim] → output like q, and what all of q paid to each key."""
    grouped = q.float().unflatten(1, (spec.kv_heads, -1))  # [tokens, kv_heads, share, dim]
    scores = spec.capped(torch.einsum("tgsd,ngd->gstn", grouped, k) * spec.scale)
    places = torch.arange(len(k), device=k.device)
    seen = places <= positions[:, None]
    if (first := spec.first_seen(positions)) is not None:
        seen &= places >= first[:, None]
    p = spec.softmax(scores.masked_fill_(~seen, float("-inf")), *scores.shape[:2])
    return torch.einsum("gstn,ngd->tgsd", p, v).flatten(1, 2), p.sum((0, 1, 2))
