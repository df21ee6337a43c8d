"""AWQ (GEMM layout): 4-bit integers packed along the outputs, eight in a word in an order of their own, a scale and a
zero for each group and output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.model.loading.formats.packed_matrix import IntegerMatrix, Parts, block_kind, group_size, unpack
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

_PARTS = ("qweight", "qzeros", "scales")
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of eight outputs lies


class Awq:
    name = "awq"

    def __init__(self, config: Mapping[str, Any]):
        bits = config.get("bits", config.get("w_bit", 4))
        self._groups = [config[name] for name in ("group_size", "q_group_size") if name in config]
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise ModelFileError(f"AWQ with {bits} bits, version {version!r}, is not supported; 4 bits of 'gemm' are")

    def split(self, name: str) -> tuple[str, str] | None:
        before, _, part = name.rpartition(".")
        return (f"{before}.weight", part) if part in _PARTS else None

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        (columns, packed), groups = infos["qweight"].shape, infos["scales"].shape[0]
        group = group_size(columns, groups, self._groups)
        return (packed * 8, columns), block_kind(4, columns, group, signed_zero=False, ordered=False)

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        numbers, zeros = (
            unpack(parts[name], 4, dim=1).unflatten(1, (-1, 8))[..., list(_ORDER)].flatten(1).t().contiguous()
            for name in ("qweight", "qzeros")
        )
        scales = parts["scales"].t()
        group = group_size(numbers.shape[1], scales.shape[1], self._groups)
        return IntegerMatrix(numbers, scales, zeros, 4, group).encoded(kind)
