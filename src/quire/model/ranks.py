"""What a model knows of tensor-parallel ranks: who it is among them, and how numbers get from one to the others.

Refuses to know: processes, what carries the bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Ranks(Protocol):
    rank: int
    size: int
    whole_experts: bool  # expert parallelism: each has some of the experts, not a part of every one

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; `x` may be overwritten."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, n] of each rank → [rows, size * n], in the order of ranks, on each of them."""
        ...
