"""What the blocks of GGUF types are made of: half floats, and fields of a few bits packed into bytes."""

from __future__ import annotations

import torch


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, [blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def fields(data: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Split bytes into fields of `bits`, low bits first: every `run` bytes give `run` low fields, then the next
    higher ones, ...: [blocks, bytes] → [blocks, bytes * 8 // bits]."""
    runs, mask = data.reshape(data.shape[0], -1, run), (1 << bits) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).view(data.shape[0], -1)


def words(data: torch.Tensor, size: int) -> torch.Tensor:
    """Little-endian words of `size` bytes: [blocks, bytes] → [blocks, bytes // size] int64."""
    shifts = torch.arange(0, 8 * size, 8, device=data.device)
    return (data.reshape(data.shape[0], -1, size).long() << shifts).sum(-1)


def split_words(data: torch.Tensor, shifts: tuple[int, ...], bits: int) -> torch.Tensor:
    """Fields of `bits` at these places of every word: [blocks, words] int64 → [blocks, words * len(shifts)]."""
    places = torch.tensor(shifts, device=data.device)
    return ((data[:, :, None] >> places) & ((1 << bits) - 1)).flatten(1)
