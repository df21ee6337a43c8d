"""A weight source whose layers' plain matrices are quantised to 4 bits as they are read: blocks of 32 with a scale and
a minimum (Q4_1). 8 bits need no such source: the compiled decoder keeps floats in 8 bits by itself."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from quire.kernels.reference.dequant import FLOATS, dequantize
from quire.model.loading.formats.packed_matrix import BLOCK, IntegerMatrix
from quire.types.seams import TensorInfo, WeightSource

_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blk)\.\d+\.")


class FourBitSource:
    def __init__(self, source: WeightSource):
        self._source = source
        self._stored = source.tensors()
        self._tensors = {name: self._as_blocks(info) for name, info in self._stored.items()}

    @staticmethod
    def _as_blocks(info: TensorInfo) -> TensorInfo:
        plain = info.kind in FLOATS and len(info.shape) == 2 and _IN_LAYER.search(info.name)
        if not plain or info.shape[1] % BLOCK or info.shape[0] < BLOCK:
            return info
        return TensorInfo(info.name, info.shape, "Q4_1", info.shape[0] * info.shape[1] // BLOCK * 20)

    def metadata(self) -> dict[str, Any]:
        return self._source.metadata()

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        raw, stored = self._source.read(name), self._stored[name]
        if self._tensors[name].kind == stored.kind:
            return raw
        weight = dequantize(torch.from_numpy(raw.copy()).view(stored.shape[0], -1), stored.kind).float()
        return quantised_4_bits(weight).encoded("Q4_1").contiguous().flatten().numpy()


def quantised_4_bits(weight: torch.Tensor) -> IntegerMatrix:
    """Rounded to the nearest of 16 steps between the least and the largest number of each block."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    low, high = blocks.aminmax(dim=-1)
    scales = ((high - low) / 15).clamp(min=1e-12)
    numbers = ((blocks - low.unsqueeze(-1)) / scales.unsqueeze(-1)).round_().clamp_(0, 15)
    return IntegerMatrix(numbers.flatten(1).to(torch.uint8), scales, -low / scales, 4, BLOCK)
