"""GPTQ: integers packed along the inputs, a scale and a zero for each group and output; with act-order, `g_idx` says
which group an input is of. Zeros are stored less one, but for `gptq_v2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.packed_matrix import IntegerMatrix, Parts, block_kind, group_size, unpack
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Gptq:
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]):
        self._bits = int(config.get("bits", 4))
        if self._bits not in (2, 3, 4, 8):
            raise ModelFileError(f"GPTQ with {self._bits} bits is not supported; 2, 3, 4 and 8 are")
        dynamic = config.get("dynamic")  # GPTQModel: what differs in some modules
        said = [config, *(dynamic.values() if isinstance(dynamic, Mapping) else ())]
        self._groups = [each["group_size"] for each in said if isinstance(each, Mapping) and "group_size" in each]
        self._ordered = bool(config.get("desc_act"))
        self._offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def split(self, name: str) -> tuple[str, str] | None:
        before, _, part = name.rpartition(".")
        return (f"{before}.weight", part) if part in _PARTS else None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        packed, scales = infos["qweight"].shape, infos["scales"].shape
        columns = packed[0] * 32 // self._bits
        group = group_size(columns, scales[0], self._groups)
        ordered = self._ordered and scales[0] > 1
        kind = block_kind(self._bits, columns, group, signed_zero=False, ordered=ordered)
        return (packed[1], columns), kind

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        numbers = unpack(parts["qweight"], self._bits, dim=0).t().contiguous()
        scales = parts["scales"].t()
        zeros = unpack(parts["qzeros"], self._bits, dim=1, count=scales.shape[0]).t().short() + self._offset
        ordered = parts["g_idx"] if self._ordered and scales.shape[1] > 1 else None
        group = group_size(numbers.shape[1], scales.shape[1], self._groups)
        return IntegerMatrix(numbers, scales, zeros, self._bits, group, ordered).encoded(kind)
