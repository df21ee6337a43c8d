"""One tensor as it lies in a file, and how its numbers get into memory.

Copies in slices of rows, so that beside the destination only a bounded piece is ever unpacked. Refuses to know:
file formats' headers, where the tensor goes.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.kernels.reference.dequant import FLOATS, FORMATS, dequantize
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

SLICE = 1 << 24  # elements unpacked at a time


def not_finite(name: str) -> str:
    return f"tensor {name!r} holds numbers or scales that are not finite; the file is damaged, fetch it again"


class RowOrder(Protocol):
    def index(self, rows: int) -> torch.Tensor:
        """[rows]: which stored row each wanted one is."""
        ...


@dataclass(frozen=True)
class UnpairedHeads:
    """Each head's rows are in interleaved-pair order (x0 y0 x1 y1 ...) and are wanted in half order (x0 x1 ... y0 y1
    ...), as half-rotation RoPE needs; with `rotary`, so many of them, and those behind stay."""

    heads: int
    rotary: int | None = None
    skip: int = 0  # rows of each head before those

    def index(self, rows: int) -> torch.Tensor:
        heads = torch.arange(rows).view(self.heads, -1)
        end = heads.shape[1] if self.rotary is None else self.skip + self.rotary
        halves = heads[:, self.skip : end].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        return torch.cat((heads[:, : self.skip], halves, heads[:, end:]), dim=1).flatten()


@dataclass(frozen=True)
class RotaryFirst:
    """Each head's last `rotary` rows come first, out of interleaved pairs if they are in such."""

    heads: int
    rotary: int
    paired: bool

    def index(self, rows: int) -> torch.Tensor:
        heads = torch.arange(rows).view(self.heads, -1)
        rotated = heads[:, -self.rotary :]
        if self.paired:
            rotated = rotated.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        return torch.cat((rotated, heads[:, : -self.rotary]), dim=1).flatten()


@dataclass(frozen=True)
class Ungrouped:
    """Rows are those of each group in turn, in runs of these sizes; wanted are the first runs of all groups, the second
    ones ..."""

    groups: int
    sizes: tuple[int, ...]

    def index(self, rows: int) -> torch.Tensor:
        runs = torch.arange(rows).view(self.groups, -1).split(self.sizes, dim=1)
        return torch.cat([run.flatten() for run in runs])


class StoredTensor:
    """A tensor's raw bytes, seen in the orientation the model wants.

    `transposed`: the file holds [in, out]. `order`: in which its rows are wanted. `offset` is added to every number.
    `negated_exp`: the file holds -exp(x) where x is wanted. A vector counts as one row, unless it has an order.
    """

    def __init__(
        self,
        info: TensorInfo,
        raw: np.ndarray,
        *,
        transposed: bool = False,
        order: RowOrder | None = None,
        offset: float = 0.0,
        negated_exp: bool = False,
    ):
        if info.kind not in FLOATS and info.kind not in FORMATS:
            known = ", ".join([*FLOATS, *FORMATS])
            raise ModelFileError(f"tensor {info.name!r} has type {info.kind}, which is not supported; known: {known}")
        unit, nbytes = (1, FLOATS[info.kind].itemsize) if info.kind in FLOATS else FORMATS[info.kind][:2]
        if info.shape[-1] % unit or raw.size != math.prod(info.shape) // unit * nbytes:
            raise ModelFileError(f"tensor {info.name!r}: {raw.size} bytes do not hold {info.shape} of {info.kind}")
        self.info = info
        self.shape = info.shape[::-1] if transposed else info.shape
        self._transposed = transposed
        self._order = order
        self._offset = offset
        self._negated_exp = negated_exp
        self._raw = raw

    @property
    def as_stored(self) -> bool:
        """Whether `rows` are what the model wants, if in another order."""
        return not (self._transposed or self._offset or self._negated_exp)

    def rows(self) -> torch.Tensor:
        """Raw bytes by row, [rows, bytes per row] uint8, in order: rows are whole blocks, so that reordering them never
        needs unpacking."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mapped files are read-only, and nothing here writes to them
            raw = torch.from_numpy(self._raw)
        vector = len(self.info.shape) == 1 and self._order is None
        rows = raw.view(1 if vector else self.info.shape[0], -1)
        return rows if self._order is None or self._transposed else rows[self._order.index(len(rows))]

    def copy_into(self, out: torch.Tensor) -> None:
        """Unpack into `out`, converting to its dtype, on its device."""
        rows = self.rows()
        columns = None if self._order is None or not self._transposed else self._order.index(self.shape[0])
        if self._transposed:
            out = out.t()
        elif len(self.shape) == 1:
            rows, out = rows.reshape(1, -1), out[None]
        step = max(1, SLICE // max(1, out.shape[1]))
        for first in range(0, out.shape[0], step):
            piece = rows[first : first + step].to(out.device)
            numbers = dequantize(piece, self.info.kind)
            numbers = (-numbers.float()).log() if self._negated_exp else numbers
            if not _sound(numbers, infinite=self.info.kind in FLOATS and len(self.info.shape) == 1):
                raise ModelFileError(not_finite(self.info.name))
            numbers = numbers if columns is None else numbers[:, columns.to(numbers.device)]
            out[first : first + step].copy_(numbers.float() + self._offset if self._offset else numbers)


def _sound(numbers: torch.Tensor, *, infinite: bool) -> bool:
    """Whether there is no NaN, nor anything infinite unless that may be (a bias rules something out). Of the extremes,
    which NaN reaches too: one pass over the numbers, where a look at each makes several."""
    if not numbers.numel():
        return True
    extremes = [extreme.item() for extreme in numbers.aminmax()]
    return not any(map(math.isnan, extremes)) and (infinite or all(map(math.isfinite, extremes)))
