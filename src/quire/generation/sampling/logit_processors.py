"""Logit processors: bias, bad words, penalties and grammar masks, applied in place on a flat view.

Each function takes the logits of a whole batch [n, vocab] and the rows (int64 [m]) it concerns. Several entries
may name the same token of a row; they then either write equal values or add zeros and infinities, so the order in
which a device handles them does not show.

Refuses to know: slots, how tokens are drawn.
"""

from __future__ import annotations

import torch

from quire.generation.sampling.slot_params import PAD, Params
from quire.kernels.triton import why_not

_NEG_INF = float("-inf")
_MIN_ALLOWED_LOGIT = -1e30  # of a token that a grammar allows, whatever else forbids it: grammars go last


def add_bias(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """ids int64 [m, b], values float32 [m, b]; padding adds zero to token 0"""
    logits.view(-1).scatter_add_(0, _flat(logits, rows, ids), values.reshape(-1))


def forbid(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """ids int64 [m, s]; PAD forbids nothing"""
    change = torch.zeros_like(ids, dtype=logits.dtype).masked_fill_(ids != PAD, _NEG_INF)
    add_bias(logits, rows, ids.clamp(min=0), change)


def apply_bad_words(
    logits: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,  # int32 [m, words, length]: all tokens of a word but the last, padded in front
    ends: torch.Tensor,  # int64 [m, words]: the last
    tails: torch.Tensor,  # int32 [m, length]: the tokens before the one to draw; PAD before the first
) -> None:
    """Forbid the last token of each word whose other tokens have just been produced (or prompted)."""
    matched = ((starts == tails.unsqueeze(1)) | (starts == PAD)).all(-1)
    forbid(logits, rows, ends.masked_fill(~matched, PAD))


def last_tokens(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """The `length` tokens before `positions`. tokens int32 [slots, max_len] → int32 [m, length]"""
    at = positions.unsqueeze(-1) + torch.arange(-length, 0, device=tokens.device)
    return tokens[slots.unsqueeze(-1), at.clamp(min=0)].masked_fill_(at < 0, PAD)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    params: Params,
    history: torch.Tensor,  # int32 [m, length]: tokens from the start of each slot
    positions: torch.Tensor,  # int64 [m]: known tokens; what history holds beyond them is ignored
    *,
    counts: torch.Tensor | None,  # [m or more, vocab], zeros, to count in; None: no row has what needs counts
) -> None:
    """Repetition over all known tokens, then frequency and presence over those after the prompt."""
    at = torch.arange(history.shape[-1], device=history.device)
    known = at < positions.unsqueeze(-1)
    ids = torch.where(known, history, history[:, :1]).to(torch.int64)  # beyond the end: the first token again
    flat = _flat(logits, rows, ids)
    values = logits.view(-1)[flat].view_as(ids)
    values = torch.where(values > 0, values / params.repetition, values * params.repetition)
    if counts is not None:
        produced = (known & (at >= params.prompt_len)).to(logits.dtype)
        counted = counts[: len(ids)].scatter_add_(1, ids, produced)
        seen = counted.gather(1, ids)
        counted.scatter_(1, ids, 0.0)
        values = values - params.frequency * seen - params.presence * (seen > 0)
    logits.view(-1).scatter_(0, flat, values.view(-1))


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Forbid all tokens but those whose bit is set. masks uint8 [m, bytes], lowest bit first; `rows` ascend"""
    if why_not(logits.device) is None:
        from quire.kernels.triton.adjust_kernels import mask

        return mask(logits, rows, masks)
    bytes_, shifts = (torch.arange(count, dtype=torch.uint8, device=masks.device) for count in (256, 8))
    banned = (bytes_.unsqueeze(-1) >> shifts).bitwise_and_(1) == 0  # [256, 8]: what each byte forbids
    # Looked up and added, without a branch for every token: a third of the time that filling takes.
    table = torch.zeros(banned.shape, device=masks.device).masked_fill_(banned, _NEG_INF)
    change = table.index_select(0, masks.flatten().int()).view(len(masks), -1)[:, : logits.shape[-1]]
    if len(masks) == len(logits):
        logits.clamp_(min=_MIN_ALLOWED_LOGIT).add_(change)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).clamp_(min=_MIN_ALLOWED_LOGIT).add_(change))


def _flat(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Where (row, id) lies in the flat view. [m], [m, k] → [m * k]"""
    return (rows.unsqueeze(-1) * logits.shape[-1] + ids).view(-1)
