"""`dense+`: long rows that have no cached context take cuDNN's dense attention, all others a paged backend.

A row whose keys are just its own tokens is a plain causal square, which in 16 bits cuDNN runs about twice as fast as
paged kernels do. Keys and values of all such rows are gathered from their pages first, and padded with that, a few per
cent of the time saved: a step of many rows must not have more launches than the device's queue holds, or the host waits
for it, and with it whoever waits for the step before. Refuses to know: how the paged backend works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch, GroupBatch, Part, part_of
from quire.kernels.kv_views import LayerKV, Side, take_slots

log = logging.getLogger(__name__)

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # best first
LONG = 1536  # tokens from which a row is worth calls of its own
ROUND = 512  # rows are padded to multiples of this: cuDNN prepares for each new length, some 40 to 80 ms


@dataclass(frozen=True)
class DenseRow:
    row: int
    first: int  # of its tokens, among all
    count: int
    at: int  # where it begins among the padded rows


@dataclass
class Plan:
    dense: list[DenseRow]
    tokens: torch.Tensor | None = None  # [padded tokens]: which of the step's each is; -1: none
    kv_slots: torch.Tensor | None = None  # likewise
    rest: Part | None = None  # all other rows; None: every row is dense, or none is
    paged: Any = None


# (sides, KV slots or -1, tokens per page, type) → of each side [slots, heads, dim], zeros where there is none
Gather = Callable[[Sequence[Side], torch.Tensor, int, torch.dtype], Sequence[torch.Tensor]]


class CudnnPrefill:
    def __init__(self, paged: AttentionBackend, *, long: int = LONG, gather: Gather = take_slots):
        self.paged = paged
        self._gather = gather
        self._long = long
        self._backends = BACKENDS
        self.name = f"{paged.name}, cuDNN for rows of 16 bits without context"
        self.shares = paged.shares

    def lengths(self, longest: int) -> range:
        """Those that rows are padded to, up to about so many tokens."""
        return range(-(-self._long // ROUND) * ROUND, longest + 1, ROUND)

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        if spec.softcap is not None:
            return "cuDNN's attention has no soft cap"
        if spec.sinks is not None:
            return "cuDNN's attention has no sinks"
        return self.paged.supports(spec, device)

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> Plan:
        starts = list(accumulate(batch.counts, initial=0))
        reach = spec.window or batch.tokens
        rows = [
            row
            for row, count in enumerate(batch.counts)
            if spec.itemsize == 2 and self._long <= count <= reach and count == batch.kv_lens[row]
        ]  # of more bits torch would hold a square of all tokens
        if not rows:
            return Plan([], paged=self.paged.plan(batch, group, spec))
        ends = list(accumulate((_rounded(batch.counts[row]) for row in rows), initial=0))
        dense = [DenseRow(row, starts[row], batch.counts[row], at) for row, at in zip(rows, ends, strict=False)]
        plan = Plan(dense, *_padded(dense, ends[-1], group.kv_slots))
        if others := [row for row in range(batch.rows) if row not in rows]:
            plan.rest = part_of(batch, group, others)
            plan.paged = self.paged.plan(plan.rest.batch, plan.rest.group, spec)
        return plan

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: LayerKV,
        batch: Batch,
        group: GroupBatch,
        plan: Plan,
    ) -> torch.Tensor:
        if not plan.dense:
            return self.paged.forward(spec, q, kv, batch, group, plan.paged)
        assert plan.tokens is not None and plan.kv_slots is not None
        k, v = self._gather(kv.sides, plan.kv_slots, group.tokens_per_page, q.dtype)
        padded = q
        if len(plan.tokens) > sum(one.count for one in plan.dense):
            (padded,) = self._gather([(q[:, None], None)], plan.tokens, 1, q.dtype)
        out = q.new_empty(q.shape)
        for one in plan.dense:
            held = slice(one.at, one.at + _rounded(one.count))  # keys past the end are seen by padding queries only
            begin = one.first if padded is q else one.at
            asked = padded[begin : begin + _rounded(one.count)]
            square = self._attend(spec, *(x.transpose(0, 1)[None] for x in (asked, k[held], v[held])))
            mixed = square[0, :, : one.count].transpose(0, 1)
            if one.count == len(q):
                return mixed.contiguous()  # a view where cuDNN keeps its query's layout
            out[one.first : one.first + one.count] = mixed
        if plan.rest is not None:
            rest = plan.rest
            others = self.paged.forward(spec, q[rest.tokens], kv, rest.batch, rest.group, plan.paged)
            out.index_copy_(0, rest.tokens, others)
        return out

    def _attend(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """A causal square, [1, heads, tokens, dim] each. Where cuDNN fails (it says that it can and cannot, as when it
        finds no memory of its own), requests go on without it."""
        backends = self._backends
        try:
            with sdpa_kernel(backends, set_priority=True):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
                )
        except RuntimeError as error:
            if "cuDNN" not in str(error) or backends is not BACKENDS:
                raise
            log.warning("long prompts without cached context are slower from now on, because cuDNN failed: %s", error)
            self._backends = BACKENDS[1:]
            return self._attend(spec, q, k, v)


def _rounded(count: int) -> int:
    return -(-count // ROUND) * ROUND


def _padded(dense: list[DenseRow], total: int, kv_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, KV slots) of dense rows, each padded with -1."""
    every = torch.arange(len(kv_slots), device=kv_slots.device)
    tokens, slots = kv_slots.new_full((2, total), -1)
    for one in dense:
        tokens[one.at : one.at + one.count] = every[one.first : one.first + one.count]
        slots[one.at : one.at + one.count] = kv_slots[one.first : one.first + one.count]
    return tokens, slots
