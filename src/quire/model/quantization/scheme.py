"""The seam of a quantization scheme: the tensors that a matrix is kept as, how they get there and are multiplied.

Two ways to multiply: `apply`, the plain product that everything else is checked against, and `product`, which on a GPU
takes norm, gate and residual along where that is faster. Refuses to know: names, layers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quire.model.loading.stored_tensor import StoredTensor

State = dict[str, torch.Tensor]  # what a scheme keeps for one matrix


class Matrix(Protocol):
    """What a product needs to know of a `Linear`."""

    columns: int
    parts: tuple[int, ...]
    bias: torch.Tensor | None

    @property
    def state(self) -> State: ...


class RMSNorm(Protocol):
    """What a product needs to know of a `Norm`."""

    weight: torch.Tensor
    eps: float


class QuantScheme(Protocol):
    name: str
    fuses: tuple[str, ...]  # what `product` may take along: of "norm", "gate" and "residual"

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        """Unfilled storage of a [rows, columns] matrix."""
        ...

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        """Put a stored matrix at rows first_row .. first_row + weight.shape[0]."""
        ...

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        """Put plain numbers there: rows, or, of a tensor-parallel rank, a part of their columns."""
        ...

    def finish(self, state: State) -> None:
        """Called once all rows are in place."""
        ...

    def scale(self, state: State, factors: torch.Tensor) -> None:
        """Multiply each row by a factor, a power of two."""
        ...

    def invariant(self) -> QuantScheme:
        """The same, with products that give a row the same bits in any batch."""
        ...

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, columns] → [tokens, rows]."""
        ...

    def product(
        self,
        linear: Matrix,
        x: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gate: bool = False,
    ) -> torch.Tensor | None:
        """The product by Triton and library kernels, in one of two places of a layer:

        With `norm` (RMS), the input is the norm of `residual` once `x`, where there is one, was added to it. `gate`:
        the outputs are gate and up of a SwiGLU, and silu(gate) * up may be returned instead of both.
        Without, the input is `x`, through the gate first if it is twice as wide as the matrix; where that costs nothing
        the result is added to `residual`, if given, and None returned."""
        ...
