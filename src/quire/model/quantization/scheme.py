"""A matrix multiplication whose weights are stored by a scheme, and the plainest scheme: dense floats.

A `Linear` may be several matrices stacked along their outputs (q, k, v), multiplied in one go. Its scheme decides
how weights lie in memory, how stored tensors get there and how to multiply. Refuses to know: names, layers.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from quire.model.loading.stored_tensor import StoredTensor

State = dict[str, torch.Tensor]  # what a scheme keeps for one matrix


class QuantScheme(Protocol):
    name: str

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        """Unfilled storage of a [rows, columns] matrix."""
        ...

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        """Put a stored matrix at rows first_row .. first_row + weight.shape[0]."""
        ...

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        """Put plain numbers there."""
        ...

    def scale(self, state: State, factors: torch.Tensor) -> None:
        """Multiply each row by a factor, a power of two."""
        ...

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, columns] → [tokens, rows]."""
        ...


class DenseScheme:
    """Weights in the compute dtype; quantised files are dequantised as they are loaded."""

    name = "dense"

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"weight": torch.empty(rows, columns, device=device, dtype=dtype)}

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        weight.copy_into(state["weight"][first_row : first_row + weight.shape[0]])

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        state["weight"][first_row : first_row + rows.shape[0]] = rows

    def scale(self, state: State, factors: torch.Tensor) -> None:
        state["weight"] *= factors[:, None].to(state["weight"].dtype)

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, state["weight"], bias)


class Linear:
    """`parts` are the output sizes of the stacked matrices; `tied` is another module's tensor to use as weight."""

    def __init__(
        self,
        columns: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        scheme: QuantScheme,
        device: torch.device,
        dtype: torch.dtype,
        tied: torch.Tensor | None = None,
    ):
        self.columns = columns
        self.parts = parts
        self.scheme = scheme if tied is None else DenseScheme()  # a table of embeddings is dense
        self.state = scheme.create(sum(parts), columns, device, dtype) if tied is None else {"weight": tied}
        self.tied = tied is not None
        self.bias = torch.empty(sum(parts), device=device, dtype=dtype) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scheme.apply(self.state, x, self.bias)

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Shapes of the stored tensors that fill it, by (kind, part)."""
        shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        for part, rows in enumerate(self.parts):
            if not self.tied:
                shapes["weight", part] = (rows, self.columns)
            if self.bias is not None:
                shapes["bias", part] = (rows,)
        return shapes

    def load(self, kind: str, part: int, stored: StoredTensor) -> None:
        """From `part` on: a stored tensor may already hold several parts stacked."""
        first = sum(self.parts[:part])
        if kind == "weight":
            self.scheme.load(self.state, first, stored)
        else:
            assert self.bias is not None
            stored.copy_into(self.bias[first : first + stored.shape[0]])

    def scale(self, factors: torch.Tensor) -> None:
        """Multiply each output by a factor, a power of two: [sum(parts)]."""
        self.scheme.scale(self.state, factors)
        if self.bias is not None:
            self.bias *= factors.to(self.bias.dtype)

    def tensors(self) -> State:
        own = {} if self.tied else dict(self.state)
        return own | ({} if self.bias is None else {"bias": self.bias})


class Plain:
    """Tensors used as they are: a norm's weight and bias, a table of embeddings."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, device: torch.device, dtype: torch.dtype):
        self.weight = torch.empty(shape, device=device, dtype=dtype)
        self.bias = torch.empty(shape, device=device, dtype=dtype) if bias else None

    def needs(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {(kind, 0): tuple(tensor.shape) for kind, tensor in self.tensors().items()}

    def load(self, kind: str, part: int, stored: StoredTensor) -> None:
        stored.copy_into(self.tensors()[kind])

    def tensors(self) -> State:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
