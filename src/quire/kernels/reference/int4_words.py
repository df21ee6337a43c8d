"""How 4-bit weights lie on a GPU: in chunks of 128 columns, [columns / 128, rows, 32] words of 16 bits. Word c of a row
has columns c, c + 32, c + 64 and c + 96 of the chunk, low bits first.

Refuses to know: files, products.
"""

from __future__ import annotations

import torch

CHUNK = 128  # columns whose integers share words
_QUARTER = CHUNK // 4


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Integers below 16, [rows, columns] → int16 [columns / 128, rows, 32]."""
    quarters = numbers.to(torch.int32).unflatten(1, (-1, 4, _QUARTER))
    return (quarters << _shifts(numbers)).sum(2).to(torch.int16).transpose(0, 1).contiguous()


def unpacked(words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Words, and scales and zeros [groups, rows] → float32 [rows, columns]."""
    numbers = (words.transpose(0, 1).to(torch.int32).unsqueeze(2) >> _shifts(words)) & 15
    grouped = numbers.float().flatten(1).unflatten(1, (scale.shape[0], -1))
    return ((grouped - zero.float().t().unsqueeze(2)) * scale.float().t().unsqueeze(2)).flatten(1)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 16, 4, dtype=torch.int32, device=like.device)[:, None]
