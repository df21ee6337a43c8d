"""What a model knows of parallel ranks: who it is among them, and how numbers get from one to the others.

Refuses to know: processes, what carries the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class Ranks(Protocol):
    """Tensor-parallel ranks, which share every layer, the stages of a pipeline, which have some layers each, or
    context-parallel ranks, which have every layer, and some of the tokens."""

    rank: int
    size: int
    pipeline: bool
    context: bool
    whole_experts: bool  # expert parallelism: each has some of the experts, not a part of every one

    @property
    def tensor(self) -> Ranks | None:
        """Of a context-parallel rank, those that have the same tokens and share its layers; None: it has all."""
        ...

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; `x` may be overwritten."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, n] of each rank → [rows, size * n], in the order of ranks, on each of them."""
        ...

    def send(self, x: torch.Tensor) -> None:
        """To the next stage; from the last, to the first."""
        ...

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """From the stage before; on the first, from the last."""
        ...

    def transfer(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> Callable[[], None]:
        """Begin to send to these ranks, and to receive from these; the function that is returned waits for the end.
        All ranks begin the same transfers in the same order."""
        ...
