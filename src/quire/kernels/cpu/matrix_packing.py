"""Matrices packed for the compiled kernels, and the memory they lie in.

Owns native memory and frees it when collected. Refuses to know: what a matrix is for, names of tensors, files.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.kernels.cpu import shared_object as lib
from quire.kernels.cpu.structs import Matrix
from quire.kernels.reference.dequant import dequantize

# Of csrc/common.h: how packed matrices keep weights, and how many blocks of 32 share factors there.
BYTE, NIBBLE, FIVE, SIX_K, FIVE_K, FOUR_K, THREE_K, TWO_K, MX_FOUR = range(9)
RUNS = (1, 1, 1, 8, 8, 8, 8, 8, 1)


class Form(NamedTuple):
    """From what a matrix is packed, and to what."""

    number: int  # of the stored kind in pack.cpp
    form: int

    @property
    def columns(self) -> int:
        """Of which a row has a multiple."""
        return 32 * RUNS[self.form]


# By a StoredTensor's kind. Others go through float32 to 8 bits with a scale per 32: at least twice as fine as 6 bits.
DIRECT = {
    "Q4_0": Form(0, NIBBLE), "Q4_1": Form(1, NIBBLE), "Q5_0": Form(5, FIVE), "Q5_1": Form(6, FIVE),
    "Q8_0": Form(2, BYTE), "Q2_K": Form(11, TWO_K), "Q3_K": Form(10, THREE_K), "Q4_K": Form(9, FOUR_K),
    "Q5_K": Form(7, FIVE_K), "Q6_K": Form(8, SIX_K), "MXFP4": Form(12, MX_FOUR),
}  # fmt: skip
FLOAT = Form(4, BYTE)
# Kernel sets that unpack 5 or 6 bits in more time than they read 8 (docs/performance.md), and what they have instead.
AS_BYTES = ("neon", "i8mm")
INSTEAD = {"Q4_K": Form(3, NIBBLE), "Q5_0": Form(5, BYTE), "Q5_1": FLOAT, "Q5_K": FLOAT, "Q6_K": FLOAT}
SLICE = 1 << 22  # elements dequantised at a time
ALIGN = 64


def form_of(kind: str, isa: str | None = None) -> Form:
    """For a kernel set: by name, or the best."""
    if kind in INSTEAD and (isa or lib.features()[0]) in AS_BYTES:
        return INSTEAD[kind]
    return DIRECT.get(kind, FLOAT)


class Store:
    """One block of memory for packed matrices, in huge pages where the system gives them; or one that is `given`, of
    zeros (uint8) or what was packed there before, which stays its owner's."""

    def __init__(self, size: int, given: torch.Tensor | None = None):
        self._at = 0
        self._size = max(size, ALIGN)
        self._given = given
        if given is not None:
            self._base = given.data_ptr()
            return
        base = lib.native().quire_reserve(self._size)
        if not base:
            raise MemoryError(f"no memory for {self._size} bytes of packed weights")
        self._base = int(base)
        weakref.finalize(self, lib.native().quire_release, self._base, self._size)

    def take(self, size: int) -> int:
        start, self._at = self._at, self._at + -(-size // ALIGN) * ALIGN
        if self._at > self._size:
            raise MemoryError("packed weights need more than was reserved for them")
        return self._base + start

    @staticmethod
    def needs(rows: int, columns: int, kind: str, isa: str | None = None) -> int:
        form = form_of(kind, isa)
        size = int(lib.native().quire_matrix_bytes(rows, columns, form.form))
        return -(-size // ALIGN) * ALIGN


class PackedMatrix:
    """A matrix [rows, columns] in the layout of csrc/common.h, filled from stored blocks. `isa`: the kernel set it is
    packed for; all can multiply by it."""

    def __init__(self, store: Store, rows: int, columns: int, kind: str, isa: str | None = None):
        self.form = form = form_of(kind, isa)
        if columns % form.columns:
            raise ValueError(f"packed matrices take multiples of {form.columns} columns, not {columns}")
        self.store = store
        self.kind = kind
        self.rows, self.columns = rows, columns
        place = store.take(Store.needs(rows, columns, kind, isa))
        self.struct = Matrix(place, rows, columns, form.form)

    def fill(self, raw: torch.Tensor) -> bool:
        """From raw bytes by row, [rows, bytes per row] uint8. False: not all that is stored is finite."""
        assert raw.shape[0] == self.rows
        finite = True
        step = max(1, SLICE // self.columns)
        for first in range(0, self.rows, step):
            piece = raw[first : first + step]
            if self.form == FLOAT:
                piece = dequantize(piece, self.kind).float()
            piece, number = piece.contiguous(), self.form.number
            done = lib.native().quire_pack(number, piece.data_ptr(), first, piece.shape[0], ctypes.byref(self.struct))
            finite = finite and bool(done)
        return finite

    def scale(self, factors: torch.Tensor) -> None:
        """Multiply each row by a factor, a power of two: only the blocks' scales change."""
        factors = factors.float().contiguous()
        assert factors.shape == (self.rows,)
        lib.native().quire_scale(ctypes.byref(self.struct), factors.data_ptr())

    def dense(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The matrix, or some of its rows, as floats, as packed: what multiplications mean."""
        wanted = range(self.rows) if rows is None else rows
        out = torch.empty(len(wanted), self.columns)
        for at, row in enumerate(wanted):
            lib.native().quire_unpack(ctypes.byref(self.struct), row, out[at].data_ptr())
        return out

    def linear(self, x: torch.Tensor, isa: str | None = None) -> torch.Tensor:
        """x [tokens, columns] float32, quantised as the program does → [tokens, rows]."""
        out = torch.empty(x.shape[0], -(-self.rows // 16) * 16)
        x = x.contiguous()
        lib.native().quire_linear(lib.kernels(isa), ctypes.byref(self.struct), x.data_ptr(), x.shape[0], out.data_ptr())
        return out[:, : self.rows]
