"""Attention within whole rows, both ways, of queries, keys and values at hand: nothing is in pages.

Rows of about the same length are padded to the longest of them and attended together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import AttentionSpec

PADDING = 1.25  # how many times as long as its shortest row the longest of a bucket may be ...
SHORT = 16  # ... or so many tokens longer
SCORES = 1 << 26  # of a bucket, at most: rows times tokens squared


@dataclass
class RowBucket:
    index: torch.Tensor  # [rows, width]: which token; of padding, any
    mask: torch.Tensor | None  # [rows, 1, 1, width]: whether a key is there; None: all are
    kept: torch.Tensor  # places in the bucket, flat, that are no padding
    tokens: torch.Tensor  # which tokens they are


def plan_rows(counts: list[int], device: torch.device) -> list[RowBucket]:
    starts = list(accumulate(counts, initial=0))
    order = sorted((row for row, count in enumerate(counts) if count), key=lambda row: counts[row])
    buckets, some = [], list[int]()
    for row in order:
        width, shortest = counts[row], counts[some[0]] if some else counts[row]
        if some and (width > max(PADDING * shortest, shortest + SHORT) or (len(some) + 1) * width * width > SCORES):
            buckets.append(_bucket(some, counts, starts, device))
            some = []
        some.append(row)
    return [*buckets, _bucket(some, counts, starts, device)]


def _bucket(rows: list[int], counts: list[int], starts: list[int], device: torch.device) -> RowBucket:
    width = counts[rows[-1]]
    lengths = torch.tensor([counts[row] for row in rows])
    places = torch.arange(width)[None]
    there = places < lengths[:, None]
    index = torch.tensor([starts[row] for row in rows])[:, None] + torch.where(there, places, 0)
    mask = None if bool(there.all()) else there[:, None, None].to(device)
    kept = there.flatten().nonzero().flatten()
    return RowBucket(index.to(device), mask, kept.to(device), index.flatten()[kept].to(device))


def attend_rows(spec: AttentionSpec, qkv: torch.Tensor, buckets: list[RowBucket]) -> torch.Tensor:
    """[tokens, heads and twice the KV heads, dim] → [tokens, heads, dim]"""
    out = qkv.new_empty(len(qkv), spec.heads, spec.head_dim)
    for bucket in buckets:
        q, k, v = qkv[bucket.index].transpose(1, 2).split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, scale=spec.scale, enable_gqa=spec.heads != spec.kv_heads
        )
        out[bucket.tokens] = mixed.transpose(1, 2).flatten(0, 1)[bucket.kept]
    return out
