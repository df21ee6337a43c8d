"""Matrices packed for the compiled CPU kernels, each part of a `Linear` in the kind it is stored in.

Refuses to know: files, layers, where their memory comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.cpu import PackedMatrix
from quire.model.loading.stored_tensor import StoredTensor, not_finite
from quire.model.quantization.scheme import Matrix, QuantScheme, RMSNorm, State
from quire.types.errors import ConfigError, ModelFileError

FOUR_BIT_KIND = "Q4_1"  # that floats are rounded to for 4 bits


class PackedScheme:
    """Of one `Linear`."""

    name = "packed"
    fuses: tuple[str, ...] = ()

    def __init__(self, matrices: Sequence[PackedMatrix]):
        """`matrices`: by part."""
        self.matrices = list(matrices)

    def create(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> State:
        return {}  # their memory is the store's

    def load(self, state: State, first_row: int, weight: StoredTensor) -> None:
        fill(self.matrices, first_row, weight)

    def put(self, state: State, first_row: int, rows: torch.Tensor) -> None:
        raise ConfigError("packed matrices are filled from files")

    def finish(self, state: State) -> None:
        pass

    def scale(self, state: State, factors: torch.Tensor) -> None:
        for matrix, part in zip(self.matrices, factors.split([m.rows for m in self.matrices]), strict=True):
            matrix.scale(part)

    def invariant(self) -> QuantScheme:
        return self

    def apply(self, state: State, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Activations are rounded to 8 bits in blocks of 32, as the compiled decoder does."""
        out = torch.cat([matrix.linear(x) for matrix in self.matrices], dim=1)
        return out if bias is None else out + bias

    def product(
        self,
        linear: Matrix,
        x: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        *,
        norm: RMSNorm | None = None,
        gate: bool = False,
    ) -> torch.Tensor | None:
        raise ConfigError("packed matrices are the compiled CPU decoder's, not for a GPU")


def fill(matrices: Sequence[PackedMatrix], first_row: int, stored: StoredTensor) -> None:
    """Those that begin at this row and behind it, until the tensor's rows are used up."""
    begin, floats = 0, None
    for matrix in matrices:
        at = begin - first_row
        begin += matrix.rows
        if not 0 <= at < stored.shape[0]:
            continue
        if stored.as_stored and stored.info.kind == matrix.kind:
            raw = stored.rows()[at : at + matrix.rows]
        else:
            if floats is None:
                floats = torch.empty(stored.shape)
                stored.copy_into(floats)
            numbers = floats[at : at + matrix.rows].contiguous()
            raw = _four_bit_blocks(numbers) if matrix.kind == FOUR_BIT_KIND else numbers.view(torch.uint8)
        if not matrix.fill(raw):
            raise ModelFileError(not_finite(stored.info.name))


def _four_bit_blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest of 16 steps between the least and the largest number of each block of 32, rows of bytes of
    (scale, minimum, 16 bytes: number i in the low bits of byte i, i + 16 in the high ones)."""
    blocks = numbers.unflatten(1, (-1, 32))
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-12)
    steps = ((blocks - low) / step).round_().clamp_(0, 15).to(torch.uint8)
    factors = torch.cat((step, low), dim=-1).half().view(torch.uint8)
    return torch.cat((factors, steps[..., :16] | steps[..., 16:] << 4), dim=-1).flatten(1)
