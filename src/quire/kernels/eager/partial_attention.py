"""Attention over some of the keys: its output, and the log-sum-exp of its scores, by which parts are put together.

    out = sum of exp(lse_i) out_i / sum of exp(lse_i)      the same as attention over all keys at once

A part that sees no key has an output of zeros and a log-sum-exp of -inf. Refuses to know: pages, ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.attention_backend import AttentionSpec

SCORES = 1 << 24  # held at once


class Partial(NamedTuple):
    out: torch.Tensor  # float32 [..., heads, value dim]
    lse: torch.Tensor  # float32 [..., heads]

    @classmethod
    def nothing(cls, spec: AttentionSpec, q: torch.Tensor) -> Partial:
        """Of queries [tokens, heads, dim] that have seen no key yet."""
        shape = q.shape[:-1]
        out = torch.zeros(*shape, spec.value_dim, device=q.device)
        return cls(out, torch.full(shape, float("-inf"), device=q.device))

    def packed(self) -> torch.Tensor:
        return torch.cat((self.out, self.lse[..., None]), dim=-1)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> Partial:
        return cls(packed[..., :-1], packed[..., -1])

    def add(self, which: slice | torch.Tensor, other: Partial) -> None:
        """Put another part together with these queries', in place."""
        merged = merge([Partial(self.out[which], self.lse[which]), other])
        self.out[which], self.lse[which] = merged.out, merged.lse


def merge(parts: list[Partial]) -> Partial:
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(0)
    weights = (lses - _finite(lse)).exp()
    out = parts[0].out * weights[0][..., None]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out += part.out * weight[..., None]
    return Partial(out, lse)


def beside_sinks(spec: AttentionSpec, part: Partial) -> torch.Tensor:
    """The output of all keys, once the sinks have their share of the probabilities."""
    if spec.sinks is None:
        return part.out
    return part.out * (part.lse - spec.sinks.float()).sigmoid()[..., None]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


def visible_keys(spec: AttentionSpec, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of keys at positions [..., keys], those that queries at positions [..., queries] see: [..., queries, keys]."""
    seen = keys[..., None, :] <= positions[..., :, None]
    if (first := spec.first_seen(positions)) is not None:
        seen &= keys[..., None, :] >= first[..., :, None]
    return seen


def partial_attention(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None = None,
    *,
    causal: bool = False,
) -> Partial:
    """q [rows, queries, heads, dim] over k, v [rows, keys, kv_heads, dim], of which each sees those that are `visible`
    [rows, queries or 1, keys]; None: all, or with `causal`, of as many keys as queries, those up to its own."""
    flash = q.device.type == "cpu" and spec.softcap is None and spec.value_dim == spec.head_dim
    if visible is None and flash and k.shape[1]:
        return _flash(spec, q, k, v, causal)
    if visible is None and causal:
        visible = torch.ones(1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril_()
    return _plain(spec, q, k, v, visible)


def _flash(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Partial:
    """By torch's own kernel for CPUs, which says its log-sum-exps."""
    share, queries = spec.heads // spec.kv_heads, q.shape[1]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))  # [rows, heads, tokens, dim]
    if causal:
        k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    else:  # heads that share keys are as many more queries
        q = q.reshape(len(q), spec.kv_heads, share * queries, -1)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal, scale=spec.scale)
    out, lse = (x.reshape(len(q), spec.heads, queries, *x.shape[3:]).transpose(1, 2) for x in (out, lse))
    return Partial(out, lse)


def _plain(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None
) -> Partial:
    """Some queries at a time."""
    rows, queries, heads, _ = q.shape
    share = spec.heads // spec.kv_heads
    k, v = k.float().permute(0, 2, 3, 1), v.float().transpose(1, 2)  # [rows, kv_heads, dim, keys] and keys, dim
    out = torch.empty(rows, queries, heads, spec.value_dim, device=q.device)
    lse = torch.empty(rows, queries, heads, device=q.device)
    step = max(1, SCORES // max(1, rows * heads * k.shape[-1]))
    for first in range(0, queries, step):
        some = q[:, first : first + step].float().unflatten(2, (spec.kv_heads, share))
        grouped = some.permute(0, 2, 3, 1, 4)  # [rows, kv_heads, share, queries, dim]
        scores = spec.capped((grouped.flatten(2, 3) @ k).mul_(spec.scale)).unflatten(2, (share, -1))
        if visible is not None:
            seen = visible if visible.shape[1] == 1 else visible[:, first : first + step]
            scores.masked_fill_(~seen[:, None, None], float("-inf"))
        sums = scores.logsumexp(-1)  # [rows, kv_heads, share, queries]
        weights = scores.sub_(_finite(sums)[..., None]).exp_()
        mixed = (weights.flatten(2, 3) @ v).unflatten(2, (share, -1))
        out[:, first : first + step] = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)
        lse[:, first : first + step] = sums.permute(0, 3, 1, 2).flatten(2, 3)
    return Partial(out, lse)
