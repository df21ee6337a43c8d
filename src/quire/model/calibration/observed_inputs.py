"""What matrices are multiplied with, added up over the samples of a calibration text."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.model.quantization.dense_scheme import DenseScheme
from quire.model.quantization.scheme import State

Observer = Callable[[State, int, torch.Tensor], None]  # a state, which of its matrices (of experts: several), inputs


class ObservedInputs:
    """Of one matrix, whose columns are the inputs."""

    def __init__(self, columns: int, device: torch.device, *, gram: bool):
        self.count = 0
        self.largest = torch.zeros(columns, device=device)
        self._size = torch.zeros(columns, device=device)
        self._square = torch.zeros(columns, device=device)
        self.gram = torch.zeros(columns, columns, device=device) if gram else torch.empty(0, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Inputs [tokens, columns]."""
        size = x.abs()
        self.count += len(x)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self._size += size.sum(0)
        self._square += size.square().sum(0)
        if self.gram.numel():
            self.gram.addmm_(x.t(), x)

    def divide(self, scales: torch.Tensor) -> None:
        """As if every input had been divided by these, [columns]."""
        self.largest = self.largest / scales
        self._size /= scales
        self._square /= scales.square()
        if self.gram.numel():
            self.gram /= scales[:, None]
            self.gram /= scales

    @property
    def mean_size(self) -> torch.Tensor:
        return self._size / max(self.count, 1)

    @property
    def mean_square(self) -> torch.Tensor:
        return self._square / max(self.count, 1)


class ObservingScheme(DenseScheme):
    """Dense, and `observer`, while there is one, is shown what each matrix is multiplied with."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.observer is not None:
            self.observer(state, 0, x)
        return super().apply(state, x, bias)

    def apply_each(self, state: State, x: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
        if (observer := self.observer) is not None:
            for index, rows in enumerate(x.tensor_split(ends[:-1].cpu())):
                if len(rows):
                    observer(state, index, rows)
        return super().apply_each(state, x, ends, count)
