"""`kivi+`: KV at 4 and 2 bits as KIVI has it (Liu et al. 2024), in plain torch.

Keys are rounded channel by channel over groups of tokens, values token by token over 32 channels; the latest tokens are
read unrounded (`types/kv.py`: which, and where both lie). The compiled decoder has its own way (`csrc/kivi.h`). Refuses
to know: who owns which page, trees of drafts (which move tokens after their group was rounded).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import (
    LayerKV,
    decode_blocks,
    encode_blocks,
    encode_steps,
    pack_bits,
    put_tokens,
    take_tokens,
    unpack_bits,
)
from quire.types.kv import RESIDUAL_GROUP, residual_start


def bits_of(kv: LayerKV) -> int:
    """Of a rounded number."""
    assert kv.residual is not None
    return 8 * kv.k_pages.shape[-1] // kv.residual.k_pages.shape[-1]


def write_kivi(kv: LayerKV, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
    """K and V [tokens, kv_heads, head_dim] of one layer among the latest tokens; groups whose last token is among them
    are rounded."""
    assert kv.residual is not None and kv.k_scales is not None and kv.v_scales is not None
    latest, bits = batch.groups[kv.residual.group], bits_of(kv)
    put_tokens(kv.residual, k, v, latest.kv_slots)
    rows = torch.repeat_interleave(torch.tensor(batch.counts, device=k.device))
    ends = (batch.positions % RESIDUAL_GROUP == RESIDUAL_GROUP - 1).nonzero().flatten()
    if not len(ends):
        return
    places = batch.positions[ends, None] + torch.arange(1 - RESIDUAL_GROUP, 1, device=k.device)  # [groups, tokens]
    keys, values = (side.float() for side in _taken(kv.residual, latest, rows[ends, None], places))
    slots, size = batch.groups[kv.group].kv_slots[ends], kv.k_pages.shape[1]
    page, group = slots // size, slots % size // RESIDUAL_GROUP
    steps, scale, low = encode_steps(keys, bits, 1)
    _runs(kv.k_pages)[page, group] = pack_bits(steps, bits)
    _key_scales(kv)[page, group] = torch.cat((scale, low), dim=1).transpose(1, 2)  # [groups, kv_heads, 2, head_dim]
    packed, scales = encode_blocks(values, bits)
    _runs(kv.v_pages)[page, group], _runs(kv.v_scales)[page, group] = packed, scales


def read_rounded(kv: LayerKV, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all tokens of these pages, float32 [tokens, kv_heads, head_dim]."""
    assert kv.v_scales is not None
    bits = bits_of(kv)
    scale, low = _key_scales(kv)[pages].float()[:, :, None].unbind(-2)  # [pages, groups, 1, kv_heads, head_dim]
    keys = unpack_bits(_runs(kv.k_pages)[pages], bits).float() * scale + low
    return keys.flatten(0, 2), decode_blocks(kv.v_pages[pages], kv.v_scales[pages], bits).flatten(0, 1)


def _runs(side: torch.Tensor) -> torch.Tensor:
    """[pages, groups, tokens of a group, ...]"""
    return side.unflatten(1, (-1, RESIDUAL_GROUP))


def _key_scales(kv: LayerKV) -> torch.Tensor:
    """[pages, groups, kv_heads, scale and minimum, head_dim], where by token there would be [tokens, kv_heads, 2 a
    block]: as many numbers."""
    assert kv.k_scales is not None and kv.residual is not None
    pages, size, heads, dim = kv.residual.k_pages.shape[0], *kv.k_pages.shape[1:3], kv.residual.k_pages.shape[3]
    groups, each = size // RESIDUAL_GROUP, 2 * heads * dim
    return kv.k_scales.as_strided((pages, groups, heads, 2, dim), (kv.k_scales.stride(0), each, 2 * dim, dim, 1))


def _taken(kv: LayerKV, group: GroupBatch, row: Any, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = group.tokens_per_page
    where = group.page_table[row, places // size].long(), places % size
    return take_tokens(kv.k_pages, kv.k_scales, *where), take_tokens(kv.v_pages, kv.v_scales, *where)


class KiviRows:
    name = "kivi"
    shares = False

    def __init__(self, other: AttentionBackend):
        self.other = other

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return self.other.supports(spec, device)

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> None:
        return None

    def forward(
        self, spec: AttentionSpec, q: torch.Tensor, kv: LayerKV, batch: Batch, group: GroupBatch, plan: None
    ) -> torch.Tensor:
        assert kv.residual is not None and batch.paths is None
        out = torch.empty_like(q)
        starts, latest = list(accumulate(batch.counts, initial=0)), batch.groups[kv.residual.group]
        positions = batch.positions.tolist()
        for row in range(batch.rows):
            tokens = slice(starts[row], starts[row + 1])
            first, last = positions[starts[row]], positions[starts[row + 1] - 1]
            begin, rounded = residual_start(first), residual_start(last)
            k, v = _taken(kv.residual, latest, row, torch.arange(begin, last + 1, device=q.device))
            seen_from = torch.tensor([residual_start(p) for p in positions[tokens]], device=q.device)
            at = torch.arange(begin, last + 1, device=q.device)
            hidden = (at > batch.positions[tokens, None]) | (at < seen_from[:, None])
            if rounded:
                pages = group.page_table[row, : -(-rounded // group.tokens_per_page)].long()
                sides = (side[:rounded] for side in read_rounded(kv, pages))
                k, v = (torch.cat((old, new.float())) for old, new in zip(sides, (k, v), strict=True))
                before = torch.arange(rounded, device=q.device) >= seen_from[:, None]
                hidden = torch.cat((before, hidden), dim=1)
            out[tokens] = _attend(spec, q[tokens], k.float(), v.float(), hidden)
        return out


def _attend(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """q [tokens, heads, dim] over k, v [keys, kv_heads, dim] that are not hidden [tokens, keys]."""
    grouped = q.float().unflatten(1, (spec.kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, share, tokens, dim]
    scores = spec.capped(grouped @ k.permute(1, 2, 0)[:, None] * spec.scale).masked_fill_(hidden, float("-inf"))
    weights = spec.softmax(scores, *grouped.shape[:2])
    return (weights @ v.transpose(0, 1)[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
