"""Drawing one token per row: argmax of logits + temperature * noise over the tokens that truncation keeps.

That is the Gumbel-max form of sampling from softmax(logits / temperature). Truncation is min-p, then top-k, then
top-p over what those left. In the order of likelihood each keeps a prefix:

    token      t0    t1    t2    t3    t4    t5  ...
    min-p      keep  keep  keep  keep  keep  -        p >= min_p * p(t0)
    top-k 4    keep  keep  keep  keep  -     -
    top-p      keep  keep  -     -     -     -        until the share of the mass above reaches top_p

so a draw that needs the order at all looks at as short a prefix of it as it can, and noise is made for no more.

On a GPU compiled kernels draw instead (`kernels/triton/draw_kernels.py`), on a CPU compiled code where a model has it.
Refuses to know: slots, requests, what was done to the logits before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.generation.sampling.noise import gumbel
from quire.generation.sampling.slot_params import Params
from quire.generation.sampling.top_k import argmax_tokens, top_k_tokens

_NUCLEUS_TOKENS = 256  # that usually hold top_p of the mass
_NEG_INF = float("-inf")


def draw_plain(logits: torch.Tensor, keys: torch.Tensor, params: Params, *, min_p: bool) -> torch.Tensor:
    """From the whole vocabulary, or what min-p leaves of it: no order needed. [m, vocab] → int64 [m]"""
    if min_p:
        logits = logits.masked_fill(logits < _floor(logits.amax(-1, keepdim=True), params), _NEG_INF)
    noise = gumbel(keys, torch.arange(logits.shape[-1], device=logits.device))
    return argmax_tokens(noise.mul_(params.temperature).add_(logits))


def draw_top_k(logits: torch.Tensor, keys: torch.Tensor, params: Params, *, width: int) -> torch.Tensor:
    """From the top-k tokens, each row's k being at most `width`. [m, vocab] → int64 [m]"""
    return _draw_prefix(*top_k_tokens(logits, width), keys, params)[0]


def draw_nucleus(logits: torch.Tensor, keys: torch.Tensor, params: Params, *, min_p: bool) -> torch.Tensor:
    """From the top-p tokens of the whole vocabulary. [m, vocab] → int64 [m]"""
    vocab = logits.shape[-1]
    if logits.is_cuda or vocab <= _NUCLEUS_TOKENS:
        return _draw_prefix(*top_k_tokens(logits, vocab), keys, params)[0]
    # On a CPU values may be looked at: try the likeliest few, and order all tokens only of rows that need more.
    top = logits.amax(-1, keepdim=True)
    relative = _relative(logits, top, params)
    if min_p:
        relative.masked_fill_(logits < _floor(top, params), _NEG_INF)
    mass = relative.softmax(-1).amax(-1, keepdim=True).reciprocal_()  # the top token weighs 1, its share is 1 / mass
    drawn, covered = _draw_prefix(*top_k_tokens(logits, _NUCLEUS_TOKENS), keys, params, mass)
    rest = (~covered).nonzero().squeeze(-1)
    if len(rest):
        drawn[rest] = _draw_prefix(*top_k_tokens(logits[rest], vocab), keys[rest], params.select(rest))[0]
    return drawn


def _draw_prefix(
    logits: torch.Tensor,  # [m, width], in order
    ids: torch.Tensor,  # [m, width]
    keys: torch.Tensor,
    params: Params,
    mass: torch.Tensor | None = None,  # [m, 1]: weight of all that min-p and top-k leave, if more than is given here
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [m], and whether the prefix given held all that top-p keeps, bool [m]."""
    top = logits[:, :1]
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    allowed = (ranks < params.top_k) & (logits >= _floor(top, params))
    # Double precision, summed from the top: neither a row's neighbours nor zeros at the end change the sums.
    cumulative = _relative(logits, top, params).exp_().mul_(allowed).cumsum(-1, dtype=torch.float64)
    limit = params.top_p * (cumulative[:, -1:] if mass is None else mass)
    keep = allowed & (F.pad(cumulative[:, :-1], (1, 0)) < limit)
    keep[:, 0] = True
    covered = (cumulative[:, -1:] >= limit).squeeze(-1)
    if not logits.is_cuda:  # values may be looked at: go on with no more tokens than were kept
        most = int(keep.sum(-1).max())
        logits, ids, keep = logits[:, :most], ids[:, :most], keep[:, :most]
    scores = gumbel(keys, ids).mul_(params.temperature).add_(logits).masked_fill_(~keep, _NEG_INF)
    return ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1), covered


def _relative(logits: torch.Tensor, top: torch.Tensor, params: Params) -> torch.Tensor:
    """Log-weights: zero for the most likely token. [m, k], [m, 1] → [m, k]"""
    return (logits - top).div_(params.temperature)


def _floor(top: torch.Tensor, params: Params) -> torch.Tensor:
    """The least logit that min-p keeps. [m, 1] → [m, 1]"""
    return top + params.temperature * params.log_min_p
