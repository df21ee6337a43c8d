"""GPTQ: integers packed along the inputs, a scale and a zero for each group and output; with act-order, `g_idx` says
which group an input is of. Zeros are stored less one, but for `gptq_v2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.packed_matrix import IntegerMatrix, Parts, block_kind, unpack
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Gptq:
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]):
        self._bits = int(config.get("bits", 4))
        if self._bits not in (2, 3, 4, 8):
            raise ModelFileError(f"GPTQ with {self._bits} bits is not supported; 2, 3, 4 and 8 are")
        self._ordered = bool(config.get("desc_act"))
        self._offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def split(self, name: str) -> tuple[str, str] | None:
        before, _, part = name.rpartition(".")
        return (f"{before}.weight", part) if part in _PARTS else None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        packed, scales = infos["qweight"].shape, infos["scales"].shape
        columns = packed[0] * 32 // self._bits
        ordered = self._ordered and "g_idx" in infos
        kind = block_kind(self._bits, columns, columns // scales[0], signed_zero=False, ordered=ordered)
        return (packed[1], columns), kind

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        numbers = unpack(parts["qweight"], self._bits, dim=0).t().contiguous()
        scales = parts["scales"].t()
        zeros = unpack(parts["qzeros"], self._bits, dim=1, count=scales.shape[0]).t().short() + self._offset
        ordered = parts.get("g_idx") if self._ordered else None
        return IntegerMatrix(numbers, scales, zeros, self._bits, ordered).encoded(kind)
