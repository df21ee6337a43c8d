"""Low-rank updates (LoRA) of one matrix, of all adapters: A and B stacked by slot, so that each token takes its own.

Slot 0 is no adapter and stays zeros. Ranks below the one there is room for are padded with zeros. Refuses to know:
files, names, which token has which adapter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Update = tuple[torch.Tensor, torch.Tensor]  # A [rank, columns], B [rows, rank], B scaled
Updates = Mapping[str, Mapping[int, Update]]  # of an adapter: by module, as `Target` names them, and part of it


class LowRank:
    """Of a matrix stacked of `parts` (q, k, v): each part has its own A."""

    def __init__(self, slots: int, rank: int, columns: int, parts: tuple[int, ...], like: torch.Tensor):
        self.parts = parts
        self.rank = rank
        self.used = False  # whether any adapter had updates of this matrix
        self.a = torch.zeros(slots + 1, len(parts) * rank, columns, device=like.device, dtype=like.dtype)
        self.b = torch.zeros(slots + 1, sum(parts), rank, device=like.device, dtype=like.dtype)

    def put(self, slot: int, updates: Mapping[int, Update]) -> None:
        """An adapter's updates by part; parts it does not have stay as the base has them."""
        if not (updates or self.used):
            return
        self.used = True
        self.a[slot], self.b[slot] = 0, 0
        for part, (a, b) in updates.items():
            first, row = part * self.rank, sum(self.parts[:part])
            self.a[slot, first : first + a.shape[0]] = a.to(self.a)
            self.b[slot, row : row + self.parts[part], : a.shape[0]] = b.to(self.b)
