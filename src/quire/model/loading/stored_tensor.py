"""One tensor as it lies in a file, and how its numbers get into memory.

Copies in slices of rows, so that beside the destination only a bounded piece is ever unpacked. Refuses to know:
file formats' headers, where the tensor goes.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch

from quire.kernels.reference.dequant import FLOATS, FORMATS, dequantize
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

SLICE = 1 << 24  # elements unpacked at a time


class StoredTensor:
    """A tensor's raw bytes, seen in the orientation the model wants.

    `transposed`: the file holds [in, out]. `paired_heads`: rows of this many heads are in interleaved-pair order
    (x0 y0 x1 y1 ...) and are wanted in half order (x0 x1 ... y0 y1 ...), as half-rotation RoPE needs.
    `offset` is added to every number. A vector counts as one row, unless it has heads.
    """

    def __init__(
        self,
        info: TensorInfo,
        raw: np.ndarray,
        *,
        transposed: bool = False,
        paired_heads: int = 0,
        offset: float = 0.0,
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
        self._paired_heads = paired_heads
        self._offset = offset
        self._raw = raw

    def rows(self) -> torch.Tensor:
        """Raw bytes by row, [rows, bytes per row] uint8, heads unpaired: rows are whole blocks, so reordering
        them never needs unpacking."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mapped files are read-only, and nothing here writes to them
            raw = torch.from_numpy(self._raw)
        vector = len(self.info.shape) == 1 and not self._paired_heads
        rows = raw.view(1 if vector else self.info.shape[0], -1)
        if self._paired_heads:
            pairs = rows.shape[0] // self._paired_heads // 2
            rows = rows.view(self._paired_heads, pairs, 2, -1).transpose(1, 2).reshape(rows.shape)
        return rows

    def copy_into(self, out: torch.Tensor) -> None:
        """Unpack into `out`, converting to its dtype, on its device."""
        rows = self.rows()
        if self._transposed:
            out = out.t()
        elif len(self.shape) == 1:
            rows, out = rows.reshape(1, -1), out[None]
        step = max(1, SLICE // max(1, out.shape[1]))
        for first in range(0, out.shape[0], step):
            piece = rows[first : first + step].to(out.device)
            numbers = dequantize(piece, self.info.kind)
            out[first : first + step].copy_(numbers.float() + self._offset if self._offset else numbers)
