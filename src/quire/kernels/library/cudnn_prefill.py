"""`dense+`: long rows that have no cached context take cuDNN's dense attention, all others a paged backend.

A row whose keys are just its own tokens is a plain causal square, which in 16 bits cuDNN runs about twice as fast as
paged kernels do. Its keys and values are gathered from their pages first, a few per cent of the time saved. Refuses to
know: how the paged backend works.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch, GroupBatch, Part, part_of
from quire.kernels.kv_views import LayerKV, take_pages

log = logging.getLogger(__name__)

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # best first
LONG = 1536  # tokens from which a row is worth calls of its own
ROUND = 512  # rows are padded to multiples of this: cuDNN prepares for each new length, some 40 to 80 ms


@dataclass
class Plan:
    dense: list[tuple[int, int, int]]  # (row, first token, tokens)
    rest: Part | None = None  # all other rows; None: every row is dense, or none is
    paged: Any = None


class CudnnPrefill:
    def __init__(self, paged: AttentionBackend, *, long: int = LONG):
        self.paged = paged
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
        dense = [
            (row, starts[row], count)
            for row, count in enumerate(batch.counts)
            if spec.itemsize == 2 and self._long <= count <= reach and count == batch.kv_lens[row]
        ]  # of more bits torch would hold a square of all tokens
        if not dense:
            return Plan([], paged=self.paged.plan(batch, group, spec))
        taken = {row for row, _, _ in dense}
        rows = [row for row in range(batch.rows) if row not in taken]
        if not rows:
            return Plan(dense)
        rest = part_of(batch, group, rows)
        return Plan(dense, rest, self.paged.plan(rest.batch, rest.group, spec))

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
        out = q.new_empty(q.shape)
        for row, first, count in plan.dense:
            table = group.page_table[row, : -(-count // group.tokens_per_page)]
            # keys past the end are seen by padding queries only
            k, v = (_padded(take_pages(*side, table).flatten(0, 1)[:count].to(q.dtype)) for side in kv.sides)
            mixed = self._attend(spec, _padded(q[first : first + count]), k, v)[0, :, :count].transpose(0, 1)
            if count == len(q):
                return mixed.contiguous()  # a view where cuDNN keeps its query's layout
            out[first : first + count] = mixed
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


def _padded(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] → [1, heads, tokens rounded up, dim]"""
    missing = -x.shape[0] % ROUND
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).transpose(0, 1)[None]
