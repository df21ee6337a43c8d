"""Attention as its definition reads: row by row, explicit softmax in float32."""

from __future__ import annotations

import torch

from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import LayerKV, take_tokens


class ReferenceAttention:
    name = "reference"
    shares = False

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> None:
        return None

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: LayerKV,
        batch: Batch,
        group: GroupBatch,
        plan: None,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], spec.value_dim)
        bounds = batch.query_start.tolist()
        for row, kv_len in enumerate(batch.kv_len.tolist()):
            tokens = slice(bounds[row], bounds[row + 1])
            places = torch.arange(kv_len, device=q.device)
            if batch.paths is not None:
                places = batch.paths.places(torch.tensor(row, device=q.device), places)
            where = group.page_table[row, places // group.tokens_per_page].long(), places % group.tokens_per_page
            k, v = (take_tokens(*side, *where) for side in kv.sides)  # [kv_len, kv_heads, dim]
            out[tokens] = attend(spec, q[tokens], k, v, batch.positions[tokens])
        return out


def attend(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One row: q [tokens, heads, dim] at `positions` over k, v [kv_len, kv_heads, dim]."""
    share = spec.heads // spec.kv_heads
    q, k, v = q.float(), k.float().repeat_interleave(share, dim=1), v.float().repeat_interleave(share, dim=1)
    scores = spec.capped(torch.einsum("qhd,khd->hqk", q, k) * spec.scale)
    key_positions = torch.arange(k.shape[0], device=q.device)
    hidden = key_positions[None, :] > positions[:, None]  # [tokens, kv_len]
    if (first := spec.first_seen(positions)) is not None:
        hidden |= key_positions[None, :] < first[:, None]
        # a window that has moved on leaves null pages behind; what they hold must not matter
        v = v.masked_fill(hidden.all(dim=0)[:, None, None], 0)
    weights = spec.softmax(scores.masked_fill(hidden, float("-inf")), spec.heads)
    return torch.einsum("hqk,khd->qhd", weights, v)
