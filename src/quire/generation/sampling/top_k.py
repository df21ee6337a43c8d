"""Tokens by likelihood, in one total order: larger logit first, lower id first among equals.

Because the order is total, the first k tokens are the same however many more are asked for, on every device and by
every method below; so a row may share a wider selection with its neighbours and not notice.

Refuses to know: parameters, slots, probabilities.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.triton import why_not

_SELECT_BLOCK = 32  # tokens whose maximum decides together whether any of them can be among the first k
_ARGMAX_BLOCK = 64
_LOW_BITS = 0xFFFFFFFF


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row. [n, vocab] → int64 [n]"""
    if why_not(logits.device) is None:
        from quire.kernels.triton.sampling_kernels import argmax

        return argmax(logits)
    if logits.is_cuda:
        return logits.argmax(-1)
    # torch's CPU argmax is not vectorised, its amax is: find the block by value, then search only that.
    blocks = _blocks(logits, _ARGMAX_BLOCK)
    block = blocks.amax(-1).argmax(-1, keepdim=True)  # [n, 1]
    inside = _take_blocks(blocks, block).argmax(-1, keepdim=True)
    return (block * _ARGMAX_BLOCK + inside).squeeze(-1)


def top_k_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k tokens of each row in order. [n, vocab] → logits [n, k], ids int64 [n, k]"""
    if k * _SELECT_BLOCK * 2 > logits.shape[-1]:  # too many to leave blocks out
        ids = _smallest(_sort_keys(logits), k) & _LOW_BITS
        return logits.gather(-1, ids), ids
    # A token among the first k lies in one of the k blocks with the best best token. Blocks hold consecutive ids
    # and stay in ascending order, so ties still fall to the lower id.
    blocks = _blocks(logits, _SELECT_BLOCK)
    chosen = top_k_tokens(blocks.amax(-1), k)[1].sort(dim=-1).values  # [n, k]
    values, at = top_k_tokens(_take_blocks(blocks, chosen), k)
    return values, chosen.gather(-1, at // _SELECT_BLOCK) * _SELECT_BLOCK + at % _SELECT_BLOCK


def _smallest(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The first k of each row's sorted keys; may scramble the rest. int64 [n, size] → [n, k]"""
    if not keys.is_cuda:
        # numpy sorts integers with vector instructions: sooner done with all than torch is with a selection
        keys.numpy().sort(axis=-1)
        return keys[:, :k]
    return keys.sort(dim=-1).values if k == keys.shape[-1] else keys.topk(k, -1, largest=False).values


def _sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """One integer per token, ascending in the order: the logit's inverted bits above, the id below."""
    bits = (logits + 0.0).view(torch.int32)  # adding zero makes -0.0 and 0.0 equal
    bits = ((bits >> 31) & 0x7FFFFFFF).bitwise_xor_(bits)  # floats order as sign and magnitude, integers do not
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (bits.bitwise_not_().to(torch.int64) << 32).add_(ids)


def _blocks(logits: torch.Tensor, size: int) -> torch.Tensor:
    """[n, vocab] → [n, blocks, size], the last block filled up with -inf."""
    short = -logits.shape[-1] % size
    if short:
        logits = F.pad(logits, (0, short), value=float("-inf"))
    return logits.unflatten(-1, (-1, size))


def _take_blocks(blocks: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[n, blocks, size], int64 [n, k] → [n, k * size]"""
    index = chosen.unsqueeze(-1).expand(-1, -1, blocks.shape[-1])
    return blocks.gather(1, index).flatten(1)
