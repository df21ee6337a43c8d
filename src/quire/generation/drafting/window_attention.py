"""Attention of draft layers over the positions that were sampled last, and over a draft's own tokens.

Keys are kept as they are before rotation, and rotated by how far back of the query they are when that is known: only
differences of positions matter. Refuses to know: layers, where keys come from.
"""

from __future__ import annotations

import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def rotated(x: torch.Tensor, back: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    """x [..., heads, dim] whose position is so far `back` [...] of the query's (half-rotation style)."""
    angles = -back[..., None].float() * frequencies.to(back.device)
    cos, sin = (part(angles)[..., None, :].mul(scale).to(x.dtype) for part in (torch.cos, torch.sin))
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def attend(query: torch.Tensor, context: KeysAndValues, mask: torch.Tensor, own: list[KeysAndValues]) -> torch.Tensor:
    """[n, t, heads, value dim], of queries [n, t, heads, dim] that are scaled; `context`: [n, s, heads, dim] each,
    where `mask` [n or 1, t, s] is set; `own`: of each query's own draft tokens, [n, t, heads, dim] each."""
    keys, values = context
    scores = torch.einsum("nthd,nshd->nhts", query, keys)
    parts = [scores.masked_fill(~mask[:, None], float("-inf"))]
    parts += [(query * key).sum(-1).transpose(1, 2)[..., None] for key, _ in own]
    weights, count = torch.cat(parts, -1).float().softmax(-1).to(query.dtype), keys.shape[1]
    mixed = torch.einsum("nhts,nshd->nthd", weights[..., :count], values)
    for i, (_, value) in enumerate(own):
        mixed = mixed + weights[..., count + i].transpose(1, 2)[..., None] * value
    return mixed
