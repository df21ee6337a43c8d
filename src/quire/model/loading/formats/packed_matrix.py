"""What all formats share: parts of a matrix as stored, integers out of packed words, and a matrix of integers with a
scale and a zero for each group as blocks that the rest of the loader knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quire.types.seams import TensorInfo

Parts = Mapping[str, torch.Tensor]
BLOCK = 32  # weights of a block of Q4_1 and Q8_0
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # the exponent, as stored
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class PublishedFormat(Protocol):
    name: str

    def split(self, name: str) -> tuple[str, str] | None:
        """The tensor that a stored one is a part of, and which part; None: it is of none."""
        ...

    def matrix(self, infos: Mapping[str, TensorInfo], small: Parts) -> tuple[tuple[int, ...], str] | None:
        """Shape of what these parts are, and the kind of blocks that keeps its bits (F32: none does); `small` ones are
        read already. None: it is stored as it is."""
        ...

    def decode(self, parts: Parts, kind: str) -> torch.Tensor:
        """Its numbers as blocks of this kind, or as floats."""
        ...


def unpack(words: torch.Tensor, bits: int, *, dim: int, count: int | None = None) -> torch.Tensor:
    """Integers of `bits` out of 32-bit words, the low bits first, along `dim`; may cross from word to word."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed integers are {words.dtype}, not int32")
    words = words.movedim(dim, -1).contiguous()
    shifts = torch.arange(32, dtype=torch.int64, device=words.device)
    stream = ((words.to(torch.int64).unsqueeze(-1) & 0xFFFFFFFF) >> shifts & 1).flatten(-2)
    whole = stream.shape[-1] // bits * bits
    values = stream[..., :whole].unflatten(-1, (-1, bits)) << torch.arange(bits, device=words.device)
    out = values.sum(-1).to(torch.uint8)
    return (out if count is None else out[..., :count]).movedim(-1, dim)


@dataclass
class IntegerMatrix:
    """weight[r, c] = (numbers[r, c] - zeros[r, g]) * scales[r, g], g being the group of column c."""

    numbers: torch.Tensor  # [rows, columns] uint8
    scales: torch.Tensor  # [rows, groups]
    zeros: torch.Tensor  # [rows, groups]
    bits: int
    group: int  # columns of a group, of which the last may have fewer
    group_of: torch.Tensor | None = None  # [columns]; None: groups are runs of columns

    def __post_init__(self) -> None:
        rows, columns = self.numbers.shape
        groups = (rows, -(-columns // self.group))
        if self.scales.shape != groups or self.zeros.shape != groups:
            found = f"{tuple(self.scales.shape)} and {tuple(self.zeros.shape)}"
            raise ValueError(f"scales and zeros are {found}, and {groups} are needed")
        order = self.group_of
        if order is not None and (order.shape != (columns,) or order.min() < 0 or order.max() >= groups[1]):
            raise ValueError(f"not every one of {columns} columns has one of {groups[1]} groups")

    def encoded(self, kind: str) -> torch.Tensor:
        match kind:
            case "Q4_1":
                return self._q4_1()
            case "Q8_0":
                return self._q8_0()
            case _:
                return self._float()

    def _by_column(self, values: torch.Tensor) -> torch.Tensor:
        group = self.group_of
        if group is None:
            group = torch.arange(self.numbers.shape[1]) // self.group
        return values[:, group.long()]

    def _float(self) -> torch.Tensor:
        zeros, scales = self._by_column(self.zeros.float()), self._by_column(self.scales.float())
        return (self.numbers.float() - zeros) * scales

    def _by_block(self, values: torch.Tensor) -> torch.Tensor:
        halves = self._by_column(values)[:, ::BLOCK].half()
        if not halves.isfinite().all():
            raise ValueError("scales are not finite in 16 bits")
        return halves.contiguous().view(torch.uint8).unflatten(1, (-1, 2))

    def _q4_1(self) -> torch.Tensor:
        """Blocks of (scale, minimum, 16 bytes): number i in the low bits of byte i, i + 16 in the high ones."""
        low, high = self.numbers.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
        minimum = -self.scales.float() * self.zeros.float()
        parts = (self._by_block(self.scales), self._by_block(minimum), low | high << 4)
        return torch.cat(parts, dim=2).flatten(1)

    def _q8_0(self) -> torch.Tensor:
        """Blocks of (scale, 32 signed bytes)."""
        numbers = (self.numbers.short() - self._by_column(self.zeros.short())).to(torch.int8).view(torch.uint8)
        return torch.cat((self._by_block(self.scales), numbers.unflatten(1, (-1, BLOCK))), dim=2).flatten(1)


def group_size(columns: int, groups: int, declared: Collection[Any]) -> int:
    """Columns of a group, by what the config declares (-1 or None: there is one group) and how many there are."""
    sizes = [columns if size in (-1, None) else size for size in declared]
    for size in sizes:
        if isinstance(size, int) and size > 0 and -(-columns // size) == groups:
            return size
    if sizes or groups < 1 or columns % groups:
        said = f"groups of {', '.join(map(str, sizes))}" if sizes else "no size of groups"
        raise ValueError(f"{columns} columns have {groups} groups of scales, and the config says {said}")
    return columns // groups


def block_kind(bits: int, columns: int, group: int, *, signed_zero: bool, ordered: bool) -> str:
    """The kind of blocks that keeps integers at their size: 4 bits as Q4_1, 8 bits around zero as Q8_0. Columns that
    are grouped out of order, or groups that do not hold whole blocks, become floats."""
    if ordered or group % BLOCK or columns % BLOCK:
        return "F32"
    if bits <= 4:
        return "Q4_1"
    return "Q8_0" if signed_zero else "F32"
